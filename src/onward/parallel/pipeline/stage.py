"""One pipeline stage as a module: looks up its own features of a micro-batch, computes, and gives its values on.

Only activations travel between ranks; a micro-batch is named by its number, and every rank has its features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onward.plan.pipeline.stages import Stage

Compute = Callable[[Mapping[str, torch.Tensor], tuple[str, ...]], Mapping[str, Any]]
"""(features of the micro-batch and what the stage received, by name; names of values to compute) -> these values.
May add the loss to minimize as `MINIMIZED`, where it is not the named one."""

MINIMIZED = "onward/minimized loss"
"""Under this name a micro-batch's loss is found as this replica is to minimize it, weighed by what counts in it."""


class StageModule(nn.Module):
    """`forward(*received, microbatch=i)`: what the stage sends, as a tuple; of the last stage the loss, fp32, rank 0.

    May be wrapped by DDP, or sharded by `fully_shard` (the module itself, not its network: `compute` need not call it).

    Args:
        stage: what it computes.
        network: holds the weights, by name in its attribute `weights`, and the running statistics.
        compute: the network's forward pass, in the run's precision, by `network`'s tensors and training mode.
        loss: name of the loss on the last stage; None on the others.
        watched: outputs of the stage that training passes keep, of the last micro-batch.

    Attributes:
        kept: these values by name.
    """

    def __init__(
        self,
        stage: Stage,
        network: nn.Module,
        compute: Compute,
        loss: str | None = None,
        watched: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.stage = stage
        self.network = network
        self.loss = loss
        self.losses: dict[int, torch.Tensor] = {}
        self.watched = watched
        self.kept: dict[str, torch.Tensor] = {}
        self._compute = compute
        self._features: Sequence[Mapping[str, torch.Tensor]] = ()
        self._wanted: tuple[str, ...] | None = None

    def feed(self, features: Sequence[Mapping[str, torch.Tensor]], wanted: tuple[str, ...] | None = None) -> None:
        """Sets the features of the micro-batches to come.

        With `wanted`, forward passes give these values after those that are sent, instead of the loss.
        """
        self._features, self._wanted = features, wanted
        self.losses.clear()

    def forward(self, *received: torch.Tensor, microbatch: int) -> Any:
        """The values sent, in the order of `stage.sent`; or the loss."""
        arrived = {
            transfer.name: _arrive(tensor) if transfer.with_gradient else tensor
            for transfer, tensor in zip(self.stage.received, received, strict=True)
        }
        values = {**self._features[microbatch], **arrived}
        is_training = self._wanted is None
        own = () if self.loss is None else (self.loss,)
        wanted = (*own, *self.watched) if self._wanted is None else self._wanted
        relayed = set(self.stage.relayed)
        names = tuple(t.name for t in self.stage.sent if t.name not in relayed)
        computed = self._compute(values, tuple(dict.fromkeys((*names, *wanted))))
        if is_training and microbatch == len(self._features) - 1:
            self.kept = {name: torch.as_tensor(computed[name]).detach() for name in self.watched}
        if self.loss is not None and is_training:
            # An Identity keeps the loss apart from what the network holds: it is detached in place afterwards.
            loss = computed.get(MINIMIZED, computed[self.loss]).float() * 1.0
            self.losses[microbatch] = loss.detach()
            return loss
        anchor = next((tensor for tensor in arrived.values() if tensor.requires_grad), None)
        sent = [
            _depart(arrived[t.name] if t.name in relayed else computed[t.name], t.with_gradient, anchor)
            for t in self.stage.sent
        ]
        return tuple(sent) if is_training else (*sent, *(torch.as_tensor(computed[name]) for name in wanted))


class _Arrival(torch.autograd.Function):
    """Passes a received value on, and its gradient back in one piece of memory, as sending demands."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


class _Departure(torch.autograd.Function):
    """Passes a value on to be sent, as its own tensor.

    It hangs on a received value, too, though no gradient goes there: schedules that compute gradients of weights later
    find only weights whose value meets one that depends on what was received.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor | None) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _arrive(value: torch.Tensor) -> torch.Tensor:
    arrived: torch.Tensor = _Arrival.apply(value)  # type: ignore[no-untyped-call]
    return arrived


def _depart(value: Any, with_gradient: bool, anchor: torch.Tensor | None) -> torch.Tensor:
    tensor = torch.as_tensor(value).contiguous()
    if not with_gradient:
        return tensor.detach()
    departed: torch.Tensor = _Departure.apply(tensor, anchor)  # type: ignore[no-untyped-call]
    return departed
