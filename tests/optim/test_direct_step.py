"""A direct step of Adam and AdamW gives the bits of torch's own; where it cannot, torch's own is called."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from onward.optim.direct_step import take_step, take_step_of
from onward.optim.makers import MAKERS
from onward.optim.weight_shards import UNSHARDED


def trained(
    kind: type[torch.optim.Optimizer], is_direct: bool, says_overflow: bool = False, **options: Any
) -> list[torch.Tensor]:
    """Weights and slots after four updates; one weight lacks a gradient in the second, and the third may overflow."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), ())]
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.3}]
    optimizer = kind(groups, lr=0.1, weight_decay=0.05, **options)  # type: ignore[call-arg]
    for update in range(4):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        if update == 1:
            weights[1].grad = None
        optimizer.param_groups[0]["lr"] = 0.1 / (update + 1)
        if says_overflow:
            optimizer.found_inf = torch.tensor(float(update == 2))  # type: ignore[attr-defined]
        (take_step if is_direct else type(optimizer).step)(optimizer)
    slots = [tensor for weight in weights for tensor in optimizer.state[weight].values()]
    return [*weights, *slots]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("says_overflow", [False, True])
def test_the_bits_are_torchs_own(kind: type[torch.optim.Optimizer], says_overflow: bool) -> None:
    """Also of an update that is skipped by what the device says."""
    steps = []
    with patch.object(kind, "step", autospec=True, side_effect=kind.step) as called:
        own = trained(kind, True, says_overflow, fused=True)
        steps.append(called.call_count)
    expected = trained(kind, False, says_overflow, fused=True)
    assert all(map(torch.equal, own, expected))
    assert own[3] == (3.0 if says_overflow else 4.0)  # updates of the first weight
    assert steps == [1]  # the first update makes the slots


@pytest.mark.parametrize(
    "options", [{"fused": False}, {"fused": True, "amsgrad": True}, {"fused": True, "maximize": True}]
)
def test_what_is_more_than_the_kernel_is_torchs(options: dict[str, bool]) -> None:
    expected = trained(torch.optim.AdamW, False, **options)
    assert all(map(torch.equal, trained(torch.optim.AdamW, True, **options), expected))


def test_torch_moves_an_overflow_that_another_device_knows_of() -> None:
    """As of weights that are on the host while the gradients were computed on a GPU."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones(2)
    take_step(optimizer)
    optimizer.found_inf = torch.empty((), device="meta")  # type: ignore[attr-defined]
    with patch.object(torch.optim.AdamW, "step") as called:
        take_step(optimizer)
    assert called.call_count == 1


def test_hooks_are_called() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, calls = torch.optim.AdamW([weight], fused=True), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(3):
        weight.grad = torch.ones(2)
        take_step(optimizer)
    assert calls == [1, 1, 1]


@pytest.mark.parametrize("fused", [True, False])
def test_one_weight_alone_is_updated_by_its_group(fused: bool) -> None:
    """Another that has a gradient, too, stays as it is."""
    found = []
    for is_alone in (True, False):
        weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = torch.optim.AdamW(
            [{"params": [one], "lr": rate} for one, rate in zip(weights, (0.1, 0.2), strict=True)], fused=fused
        )
        groups = optimizer.param_groups
        for _ in range(3):
            weights[1].grad = torch.ones(3)
            weights[0].grad = torch.ones(3) if is_alone else None
            take_step_of(optimizer, groups[1], weights[1]) if is_alone else take_step(optimizer)
        assert optimizer.param_groups is groups
        assert torch.equal(weights[0], torch.ones(3))
        found.append(weights[1])
    assert torch.equal(*found)


@pytest.mark.parametrize("says_overflow", [False, True])
def test_counts_that_are_one_tensor_are_added_to_at_once(says_overflow: bool) -> None:
    """As long as all weights of a group have a gradient; else those that have one alone."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    maker = MAKERS["AdamW"]
    attributes = {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-8, "lambda": 0.01, "do_bias_correction": True}
    optimizer = maker.make([{"params": weights, **maker.group(attributes)}], UNSHARDED)
    counts = [optimizer.state[weight]["step"] for weight in weights]
    added = []
    for update in range(3):
        for weight in weights[update == 1 :]:
            weight.grad = torch.ones(2)
        if says_overflow:
            optimizer.found_inf = torch.tensor(float(update == 2))  # type: ignore[attr-defined]
        with patch("torch._foreach_add_", side_effect=torch._foreach_add_) as called:
            take_step(optimizer)
        added.append(called.call_count)
        weights[0].grad = None
    assert added == [0, 2 if says_overflow else 1, 0]
    assert torch.stack(counts).tolist() == ([1.0, 2.0, 2.0] if says_overflow else [2.0, 3.0, 3.0])
