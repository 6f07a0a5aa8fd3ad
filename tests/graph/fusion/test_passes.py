"""Fusions are turned off by name, listed by inspection, and counted in a note."""

from __future__ import annotations

from typing import get_args

import pytest

import onward
from onward.errors import ParametersError
from onward.graph.fusion.passes import FUSIONS
from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.models import create_model
from onward.parameters import Parameters
from onward.parameters.speed import FusionName, Speed
from tests.graph.fusion.pairs import TINY, kinds


def test_turned_off() -> None:
    model = create_model("gpt2", opset=14, **TINY)
    assert onward.to_torch(model, fuse=False).graph.fusions == ()
    some = onward.to_torch(model, fusions_off=("attention", "gelu", "linear"))
    assert kinds(some.graph) == {"layer_normalization": 5}


def test_every_fusion_has_a_name_that_turns_it_off() -> None:
    assert get_args(FusionName) == tuple(FUSIONS)


def test_an_unknown_fusion_is_refused() -> None:
    with pytest.raises(ParametersError, match=r"speed\.fusions_off\[0\].*'norms'.*'attention'"):
        Parameters.from_mapping(
            {
                "paths": {"model_path": "m.onnx"}, "loss": {"type": "output", "prediction": "y"},
                "training": {"batch_size": 1, "num_train_steps": 1}, "learning_rate": {"initial_lr": 1.0},
                "speed": {"fusions_off": ["norms"]},
            }
        )  # fmt: skip
    assert Speed(fusions_off=("gelu",)).fuse


def test_inspection_lists_them() -> None:
    text = render(inspect(create_model("bert", opset=14, **TINY)))
    assert "Fusions in training: 27 (speed.fuse: false or speed.fusions_off leaves them out)" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["attention", "2", "a", "mask", "that", "is", "added", "10", "nodes"] in lines
    assert ["linear", "16", "a", "product", "and", "its", "bias", "32", "nodes"] in lines
    assert ["gelu", "3", "by", "the", "error", "function", "15", "nodes"] in lines


def test_a_note_counts_them() -> None:
    spec = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    graph = make_training_graph(create_model("gpt2", opset=17, **TINY), loss=spec, fuse=True)
    assert graph.notes[-1].startswith(
        "fused for training, not in what is exported: 2 attention, 2 gelu, 1 cross_entropy, 8 linear ("
    )
