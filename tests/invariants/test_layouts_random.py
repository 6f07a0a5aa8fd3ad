"""Dropout and batch normalization in many layouts: what must differ between ranks does, what must agree does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.invariants.cases import CASES, SQUARES, Case, pictures, u_net
from tests.invariants.layouts import Layout, Result, assert_follows, assert_moves, differences, train, train_on_ranks
from tests.invariants.rank_pool import end_ranks

LAYOUTS = [
    Layout(2, 1, 1),
    Layout(2, 1, 1, {"zero_stage": 3}),
    Layout(1, 2, 1),
    Layout(1, 1, 2),
    pytest.param(Layout(2, 2, 1), marks=pytest.mark.slow),
    pytest.param(Layout(2, 1, 2, {"zero_stage": 1}), marks=pytest.mark.slow),
]
RECOMPUTE = {"recompute": {"segments": True}}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def assert_same_bits(actual: Result, expected: Result) -> None:
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    assert actual.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_run_with_dropout_repeats_bit_by_bit(layout: Layout) -> None:
    case = CASES["gpt2_with_dropout"]
    first = train(case, layout, accumulation=2, updates=4)
    assert_same_bits(train(case, layout, accumulation=2, updates=4), first)
    assert_moves(first)
    other = train(case, layout, accumulation=2, updates=4, sections={"training": {"seed": 1}})
    assert differences(other, first)[0] > 1e-4


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2)], ids=str)
def test_recompute_repeats_the_same_dropout(layout: Layout) -> None:
    case = CASES["gpt2_with_dropout"]
    kept = train(case, layout, accumulation=2, updates=4)
    assert_follows(train(case, layout, accumulation=2, updates=4, sections=RECOMPUTE), kept, 1e-6, 5e-6)


def first_half(samples: int) -> dict[str, np.ndarray]:
    """What one of the replicas sees of `twins`."""
    return {name: array.reshape(-1, 2, 4, 12)[:, 0].reshape(-1, 12) for name, array in twins(2 * samples).items()}


def twins(samples: int) -> dict[str, np.ndarray]:
    """The second half of every eight samples is the first half again: two replicas see the same."""
    data = CASES["gpt2"].data(samples)
    return {name: array.reshape(-1, 2, 4, 12)[:, [0, 0]].reshape(array.shape) for name, array in data.items()}


def test_replicas_drop_different_elements() -> None:
    """Two replicas with the same data: without dropout as one of them; with dropout as no single one."""
    with_twins = [Case(CASES[name].model, CASES[name].loss, twins) for name in ("gpt2", "gpt2_with_dropout")]
    halves = [Case(case.model, case.loss, first_half) for case in with_twins]
    plain, dropping = (train(case, Layout(2, 1, 1), updates=1) for case in with_twins)
    alone, dropping_alone = (train(case, Layout(), updates=1, global_batch=4) for case in halves)
    assert plain.losses == pytest.approx(alone.losses, rel=1e-6)
    # Were all ranks to draw the same numbers, rank 0's, this would be equal, too.
    assert abs(dropping.losses[0] / dropping_alone.losses[0] - 1) > 1e-4


@pytest.mark.parametrize("layout", [Layout(1, 2, 1), Layout(2, 2, 1)], ids=str)
def test_horizontal_ranks_agree_on_what_they_hold_whole(layout: Layout) -> None:
    """Weights that no rank shares out stay equal to the bit, though other dropout differs from rank to rank."""
    results = train_on_ranks(CASES["gpt2_with_dropout"], layout, updates=4)
    whole = results[0].tensors
    compared = 0
    for name, tensor in whole.items():
        copies = [result.own[name] for result in results if result.own[name].shape == tensor.shape]
        if len(copies) == len(results):
            compared += 1
            assert all(torch.equal(copy, copies[0]) for copy in copies), name
    assert compared > 10


U_NET = Case(u_net, SQUARES, pictures)


@pytest.mark.parametrize("layout", [*LAYOUTS[:2], Layout(2, 2, 1)], ids=str)
def test_local_batch_norm_ends_with_equal_statistics(layout: Layout) -> None:
    """Every replica normalizes by its own batch; the running statistics are the mean of what they saw."""
    results = train_on_ranks(U_NET, layout, accumulation=2)
    assert_moves(results[0])
    names = [name for name in results[0].own if name.startswith("states/")]
    assert len(names) == 10
    for name in names:
        mine = [result.own[name] for result in results]
        if len({tensor.shape for tensor in mine}) == 1 and mine[0].shape == results[0].tensors[name].shape:
            assert all(torch.equal(tensor, mine[0]) for tensor in mine)
    if layout.horizontal == 1:
        alone = train(U_NET, Layout(), accumulation=2)
        mean = "states/down0.mean"
        # The mean over replicas of batch means is the mean of the whole batch, update by update.
        torch.testing.assert_close(results[0].tensors[mean], alone.tensors[mean], rtol=2e-2, atol=1e-4)
        assert differences(results[0], alone)[0] > 1e-5


def test_statistics_of_the_first_update_are_the_mean_of_the_replicas() -> None:
    """Against torch: running = 0.9 * old + 0.1 * batch, averaged over the replicas."""
    data = pictures(8)
    network = torch.nn.Conv2d(1, 4, 3, padding=1, bias=False)
    model = u_net()
    kernel = model.graph.initializers["down0.weight"].const_value
    assert kernel is not None
    network.weight.data = torch.from_numpy(kernel.numpy().copy())
    found = network(torch.from_numpy(data["x"])).detach()
    halves = [found[:4], found[4:]]
    result = train(U_NET, Layout(2, 1, 1), updates=1)
    means = sum(0.1 * half.mean((0, 2, 3)) for half in halves) / 2
    torch.testing.assert_close(result.tensors["states/down0.mean"], means, rtol=1e-5, atol=1e-6)
    # ONNX leaves Bessel's correction out of the running variance (BatchNormalization-15: the population variance).
    variances = sum(0.9 + 0.1 * half.var((0, 2, 3), correction=0) for half in halves) / 2
    torch.testing.assert_close(result.tensors["states/down0.variance"], variances, rtol=1e-5, atol=1e-6)
