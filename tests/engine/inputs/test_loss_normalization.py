"""What a replica's losses are multiplied by, against counting by hand, on two real ranks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from onward.data.batches import START, Batch
from onward.engine.inputs.loss_normalization import LossNormalization
from onward.engine.micro_batches import shared_loss
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.parallel.launch.process import in_world_of_one, start
from onward.parameters import Loss, Training
from onward.parameters.distributed import Distributed
from tests.mlp import CROSS_ENTROPY, build_mlp
from tests.ranks import run_on_ranks

LABELS = [np.array([0, 1, -1, -1]), np.array([2, 2, 3, -1])]


def shares_of(
    loss: dict[str, Any], labels: list[list[np.ndarray]], samples: list[int], may_differ: bool, **training: Any
) -> Any:
    """The factor of each micro-batch of this replica; `labels` has a list of micro-batches for each."""
    graph = make_training_graph(build_mlp(), loss=LossSpec(**CROSS_ENTROPY))
    assert graph.loss_names is not None
    mesh = start(Distributed(data_parallel_size=2), "cpu") if dist.is_initialized() else in_world_of_one()
    asked = Training(batch_size=4, gradient_accumulation_steps=len(labels[0]), **training)
    shares = LossNormalization(mesh, Loss(**{**CROSS_ENTROPY, **loss}), graph.loss_names, asked, may_differ)
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = [
        Batch(features={"label": one}, cursor=START, sample_count=samples[rank], epoch=0) for one in labels[rank]
    ]
    return [None if one is None else one.item() for one in shares.of(batches)]


@pytest.mark.parametrize(
    ("loss", "may_differ", "expected"),
    [
        ({}, False, [None, None]),
        ({"ignore_index": -1}, False, [2 * 2 / 5, 3 * 2 / 5]),
        # Weights of the classes that count: 1 + 2 here, 4 + 4 + 8 there.
        ({"ignore_index": -1, "class_weights": (1.0, 2.0, 4.0, 8.0)}, False, [3 * 2 / 19, 16 * 2 / 19]),
        ({}, True, [4 * 2 / 6, 2 * 2 / 6]),
        ({"reduction": "sum"}, True, [2.0, 2.0]),
    ],
)
def test_a_replica_weighs_as_much_as_it_counts(loss: dict[str, Any], may_differ: bool, expected: list[Any]) -> None:
    found = run_on_ranks(2, shares_of, loss, [[one] for one in LABELS], [4, 2], may_differ)
    assert found == [[None if one is None else pytest.approx(one, rel=1e-6)] for one in expected]


def test_a_micro_batch_weighs_as_much_as_it_counts() -> None:
    """Of all replicas' micro-batches of the update: 2, 3, 3 and 0 labels; on request of its own step's alone."""
    labels = [[LABELS[0], LABELS[1]], [LABELS[1], np.full(4, -1)]]
    asked = ({"ignore_index": -1}, labels, [4, 4], False)
    found = run_on_ranks(2, shares_of, *asked)
    assert found == [pytest.approx([2 * 4 / 8, 3 * 4 / 8], rel=1e-6), pytest.approx([3 * 4 / 8, 0.0], rel=1e-6)]
    found = run_on_ranks(2, functools.partial(shares_of, accumulate_as="mean"), *asked)
    assert found == [pytest.approx([2 * 2 / 5, 3 * 2 / 3], rel=1e-6), pytest.approx([3 * 2 / 5, 0.0], rel=1e-6)]
    assert shares_of(*asked) == pytest.approx([2 * 2 / 5, 3 * 2 / 5], rel=1e-6)


def test_where_nothing_counts_losses_stay_what_they_are() -> None:
    nothing = [[np.full(4, -1)], [np.full(4, -1)]]
    assert run_on_ranks(2, shares_of, {"ignore_index": -1}, nothing, [4, 4], False) == [[1.0], [1.0]]


def test_a_process_alone_weighs_nothing() -> None:
    assert shares_of({"ignore_index": -1}, [[one] for one in LABELS], [4], True) == [None]


def test_a_loss_of_nothing_counts_for_nothing_and_has_no_gradient() -> None:
    logits = torch.ones(2, 3, requires_grad=True)
    empty = torch.nn.functional.cross_entropy(logits, torch.tensor([-100, -100]))
    assert empty.isnan()
    total = shared_loss({"a": empty, "b": logits.sum()}, ("a", "b"), torch.tensor([0.0, 2.0]))
    assert float(total.detach()) == 12.0
    total.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[2.0] * 3] * 2
