"""A stage as a module, without a pipeline around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from onward.parallel.pipeline.stage import StageModule
from onward.plan.pipeline.stages import Stage, Transfer


def stage(received: tuple[Transfer, ...], sent: tuple[Transfer, ...], outputs: tuple[str, ...] = ()) -> Stage:
    return Stage(
        index=1,
        nodes=("y",),
        repeated=(),
        weights=("weight",),
        states=(),
        inputs=("x",),
        received=received,
        sent=sent,
        outputs=outputs,
    )


HIDDEN, KEPT, WHOLE = Transfer("hidden", True, 0), Transfer("kept", True, 0), Transfer("whole", False, 0)
TURNED = Transfer("turned", True, 1)


class Recording:
    """Computes `turned` = (hidden + x) transposed, and writes down what it was given and asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[set[str], tuple[str, ...]]] = []

    def __call__(self, values: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, Any]:
        self.calls.append((set(values), names))
        turned = (values["hidden"] * 2 + values["x"]).T
        found = {"turned": turned, "loss": turned.half().sum(), "count": 3}
        return {name: found[name] for name in names}


def test_it_computes_what_it_sends_and_passes_the_rest_on() -> None:
    compute = Recording()
    module = StageModule(stage((HIDDEN, KEPT, WHOLE), (KEPT, WHOLE, TURNED)), nn.Linear(1, 1), compute)
    features = [{"x": torch.ones(2, 3), "weights of the loss": torch.ones(1)}, {"x": torch.zeros(2, 3)}]
    module.feed(features)
    hidden, kept = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    sent = module(hidden, kept, torch.arange(4), microbatch=0)
    assert [tuple(value.shape) for value in sent] == [(2, 3), (4,), (3, 2)]
    assert torch.equal(sent[2], (hidden * 2 + 1).T)
    assert compute.calls == [({"x", "weights of the loss", "hidden", "kept", "whole"}, ("turned",))]
    assert torch.equal(module(hidden, kept, torch.arange(4), microbatch=1)[2], (hidden * 2).T)


def test_what_travels_is_in_one_piece_and_no_view_and_so_is_its_gradient() -> None:
    """Gloo and NCCL send memory as it lies; torch's zero-bubble schedules detach what was sent in place."""
    module = StageModule(stage((HIDDEN, KEPT), (KEPT, TURNED)), nn.Linear(1, 1), Recording())
    module.feed([{"x": torch.zeros(2, 3)}])
    hidden, kept = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    sent = module(hidden, kept, microbatch=0)
    assert all(value.is_contiguous() and not value._is_view() and not value.is_leaf for value in sent)
    gradient = torch.ones(()).expand(3, 2)
    (found,) = torch.autograd.grad(sent[1], hidden, gradient)
    assert found.is_contiguous()
    assert torch.equal(found, torch.full((2, 3), 2.0))
    for value in sent:
        value.detach_()


def test_the_last_stage_gives_the_loss_and_remembers_it() -> None:
    module = StageModule(stage((HIDDEN,), (), ("loss",)), nn.Linear(1, 1), Recording(), loss="loss")
    module.feed([{"x": torch.zeros(2, 3)}])
    hidden = torch.ones(2, 3, requires_grad=True)
    loss = module(hidden, microbatch=0)
    assert (loss.dtype, loss.item()) == (torch.float32, 12.0)
    assert module.losses[0].item() == 12.0
    loss.backward()
    loss.detach_()
    assert hidden.grad is not None
    module.feed(())
    assert module.losses == {}


def test_evaluation_asks_for_values_in_the_place_of_the_loss() -> None:
    compute = Recording()
    module = StageModule(stage((HIDDEN,), (TURNED,)), nn.Linear(1, 1), compute)
    module.feed([{"x": torch.zeros(2, 3)}], ("count", "turned"))
    with torch.no_grad():
        values = module(torch.ones(2, 3), microbatch=0)
    assert [tuple(value.shape) for value in values] == [(3, 2), (), (3, 2)]
    assert values[1].item() == 3
    assert compute.calls[0][1] == ("turned", "count")


def test_a_missing_value_is_noticed() -> None:
    module = StageModule(stage((HIDDEN, KEPT), (KEPT,)), nn.Linear(1, 1), Recording())
    module.feed([{"x": torch.zeros(2, 3)}])
    with pytest.raises(ValueError, match="zip"):
        module(torch.ones(2, 3), microbatch=0)
