"""Weight updates inside the backward pass: each weight as soon as its gradient is complete, which is then dropped, so
that the gradients of all weights are never in memory at once (Lv et al. 2023, "Full Parameter Fine-tuning for Large
Language Models with Limited Resources", arXiv 2306.09782)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onward.engine.gradient_norm import norm_of_all, norm_of_each
from onward.engine.state import TrainState
from onward.errors import OnwardError
from onward.optim.building import set_learning_rate
from onward.optim.direct_step import take_step_of
from onward.parallel.gradients import count_not_finite

Select = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Weights -> copies of those that a report is to hold, and of their gradients."""


@dataclass(frozen=True)
class BackwardUpdate:
    """What the updates inside a backward pass tell.

    Attributes:
        norm: global L2 norm of the gradient, on the device.
        overflowed: whether weights were left as they were, a boolean on the device: all of them where the loss or
            running statistics overflowed, else each whose own gradient is not finite.
        updated: the weights that had a gradient.
        tensors: what was selected, from before the update of each weight.
    """

    norm: torch.Tensor
    overflowed: torch.Tensor
    updated: frozenset[str]
    tensors: Mapping[str, torch.Tensor]


class UpdateInBackward:
    """The backward pass of a run of one process whose micro-batches are updates.

    Args:
        state: whose weights and moments change.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._select: Select | None = None
        self._skips_on_device = False
        self._norms = dict[str, torch.Tensor]()
        self._tensors = dict[str, torch.Tensor]()
        self._overflowed: list[torch.Tensor] = []

    def prepare(self, learning_rate: float, select: Select | None, skips_on_device: bool) -> None:
        """Before the next backward pass.

        Args:
            learning_rate: of its updates.
            select: copies what a report is to hold; None: there is no report.
            skips_on_device: the optimizer itself leaves weights as they are where their gradients are not finite, so
                that the host need not wait.

        Raises:
            OnwardError: the last one failed after it had updated some of the weights.
        """
        refuse_torn(self._state)
        set_learning_rate(self._state.optimizer, learning_rate)
        self._select, self._skips_on_device = select, skips_on_device

    def backward(self, loss: torch.Tensor) -> None:
        """`torch.autograd.backward` with the updates; a weight that is read twice is updated after both readers."""
        state = self._state
        self._norms, self._tensors = {}, {}
        self._overflowed = [_overflowed(state, loss.detach())]
        groups = {weight: group for group in state.optimizer.param_groups for weight in group["params"]}
        with contextlib.ExitStack() as hooks:
            for name, weight in state.torch_parameters.items():
                if weight.requires_grad:
                    update = functools.partial(self._update, name, groups[weight])
                    hook = weight.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            torch.autograd.backward(loss)

    @torch.no_grad()
    def _update(self, name: str, group: dict[str, Any], weight: torch.Tensor) -> None:
        """Updates a weight whose gradient has arrived, and drops the gradient."""
        assert weight.grad is not None
        norm = norm_of_each([weight.grad])[0]
        self._norms[name] = norm
        if self._select is not None:
            self._tensors |= self._select({name: weight})
        overflowed = self._overflowed[0] | norm.isfinite().logical_not()
        self._overflowed.append(overflowed)
        if self._skips_on_device:
            self._state.optimizer.found_inf = overflowed.float()  # type: ignore[attr-defined]
        if self._skips_on_device or not overflowed:
            self._state.is_torn = True
            take_step_of(self._state.optimizer, group, weight)
        weight.grad = None

    def finish(self) -> BackwardUpdate:
        """What the last backward pass told; the state is whole again."""
        self._state.is_torn = False
        norms = [self._norms[name] for name in self._state.weights if name in self._norms]
        device = self._state.device
        overflowed = torch.stack([one.to(device) for one in self._overflowed]).any()
        found = BackwardUpdate(norm_of_all(norms), overflowed, frozenset(self._norms), self._tensors)
        self._norms, self._tensors, self._overflowed = {}, {}, []
        return found


def _overflowed(state: TrainState, loss: torch.Tensor) -> torch.Tensor:
    """Whether the loss or running statistics overflowed in the forward pass; a NaN of the loss is no overflow."""
    checked = [tensor for tensor in state.statistics().values() if tensor.is_floating_point()]
    infinite = torch.where(loss.isinf(), torch.inf, 0.0)
    return count_not_finite(loss.device, [*checked, infinite]) > 0


def refuse_torn(state: TrainState) -> None:
    """Refuses to train, save or export weights of which a failed step updated some and not others.

    Raises:
        OnwardError: there are such weights.
    """
    if state.is_torn:
        raise OnwardError(
            f"step {state.counters.step + 1} failed inside its backward pass, when speed.update_in_backward had "
            "updated some of the weights and not the others. Resume from the last checkpoint, or train without "
            "speed.update_in_backward, where a failed step leaves the weights as they were."
        )
