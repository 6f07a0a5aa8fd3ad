"""Models broken at random give a user's error and nothing else: no crash, no hang, no bare exception."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from onward import to_torch
from onward.errors import UserError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from tests.graph.mutation import mutate_bytes, mutate_structure, seed_model

LOSS = LossSpec(type="softmax_cross_entropy", prediction="y", label="labels")


@pytest.fixture(autouse=True)
def _quiet():
    """onnx-ir warns about each broken model; the errors are what counts here."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_the_seed_is_whole():
    graph = make_training_graph(seed_model(), loss=LOSS)
    assert graph.loss == "loss"


@pytest.mark.parametrize("block", range(4))
def test_broken_bytes(block: int, tmp_path: Path):
    """150 files a block; most are refused, some happen to be entire models still."""
    source = random.Random(block)
    data = seed_model().SerializeToString()
    path = tmp_path / "m.onnx"
    refused = 0
    for _ in range(150):
        path.write_bytes(mutate_bytes(source, data))
        try:
            make_training_graph(path, loss=LOSS)
        except UserError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("block", range(4))
def test_broken_structure(block: int):
    """150 models a block, read, given a loss and lowered."""
    source = random.Random(block)
    model = seed_model()
    refused = 0
    for _ in range(150):
        broken = mutate_structure(source, model)
        try:
            make_training_graph(broken, loss=LOSS)
            to_torch(broken)
        except UserError:
            refused += 1
    assert refused > 50
