"""What onward's own optimizers share: slots from the beginning, groups that are checked, corrections of the bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onward.optim.slotted_optimizer import SlottedOptimizer, corrections, new_count, zeros_like


class Signs(SlottedOptimizer):
    """Subtracts the learning rate by the gradient's sign, and counts."""

    def new_slots(self, group: dict[str, Any], weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"step": new_count(weight), "buffer": zeros_like(weight)}

    def update(self, group: dict[str, Any], weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        for weight, gradient, count in zip(weights, gradients, self.slots(weights, "step"), strict=True):
            assert gradient.dtype is weight.dtype
            count += 1
            weight -= group["lr"] * gradient.sign()


def test_slots_are_there_before_an_update_and_weights_without_a_gradient_stay() -> None:
    a, b, c = (
        torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float32)
    )
    optimizer = Signs([{"params": [a, b]}, {"params": [c], "lr": 0.5}], {"lr": 0.25})
    assert set(optimizer.state) == {a, b, c}
    a.grad, c.grad = torch.tensor([1.0, -1.0]), torch.tensor([2.0, 0.0])
    assert optimizer.step(lambda: 7.0) == 7.0
    assert (a.tolist(), b.tolist(), c.tolist()) == ([0.75, 1.25], [1.0, 1.0], [0.5, 1.0])
    assert [int(optimizer.state[one]["step"]) for one in (a, b, c)] == [1, 0, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"betas": (0.9, 1.0)}, "betas are 0.9 and 1; expected both from 0 up to, not including, 1"),
        ({"lr": -0.1}, "lr is -0.1; expected 0 or more"),
        ({"eps": float("nan")}, "eps is nan; expected 0 or more"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Signs([torch.ones(1)], options)


def test_only_masters_are_updated() -> None:
    with pytest.raises(ValueError, match=r"a weight of torch.bfloat16; Signs updates float32 masters \(or float64\)"):
        Signs([torch.ones(1, dtype=torch.bfloat16)], {})


def test_memory_layout_is_kept() -> None:
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert zeros_like(image).is_contiguous(memory_format=torch.channels_last)


def test_corrections_are_computed_in_double() -> None:
    counts = [torch.tensor(1.0), torch.tensor(1000.0)]
    found = corrections(counts, 0.999, torch.ones(1))
    assert [float(one) for one in found] == pytest.approx([1 - 0.999, 1 - 0.999**1000], rel=1e-6)
