"""Adafactor for weights of which a rank may hold shards, without waiting for the device, which torch's does twice for
every weight."""

from __future__ import annotations

from typing import Any

import torch

from onward.optim.slotted_optimizer import Slots, SlottedOptimizer, new_count
from onward.optim.weight_shards import Tensors


class Adafactor(SlottedOptimizer):
    """Shazeer & Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (arXiv 1804.04235), as
    torch.optim.Adafactor has it.

    For every weight W with gradient G, at update t = 1, 2, ..., with s = t ** beta2_decay, rms() the root mean square,
    and a matrix for the last two axes:

        R = (1 - s) * R + s * mean of G**2 over columns;  C = (1 - s) * C + s * mean of G**2 over rows
        V = R C / mean(R)                                  or (1 - s) * V + s * G**2 for a vector
        U = G / sqrt(V)
        W = W - lr * weight_decay * W
        W = W - max(min_scale, rms(W)) * min(lr, 1 / sqrt(t)) * U / max(1, rms(U) / d)

    with `eps` = (smallest mean of R and square root of V, min_scale), and W in rms(W) before it decays.

    State of every weight: `row_var` (R) and `col_var` (C), or `variance` (V) for a vector, and `step` (t). Every rank
    holds that of the full weight: it is small, and part of an update that depends on norms over the full weight.
    """

    def new_slots(self, group: dict[str, Any], weight: torch.Tensor) -> Slots:
        """Zeros, of the shapes that torch gives them."""
        shape, slots = self.shards.full_shape(weight), {"step": new_count(weight)}
        if len(shape) > 1:
            slots["row_var"] = weight.new_zeros((*shape[:-1], 1))
            slots["col_var"] = weight.new_zeros((*shape[:-2], 1, shape[-1]))
        else:
            slots["variance"] = weight.new_zeros(shape)
        return slots

    def update(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        """Updates weights one by one, since only one is gathered at a time."""
        rate = group["lr"]
        for weight, gradient in zip(weights, gradients, strict=True):
            full = self.shards.gather(weight, gradient)
            size = _root_mean_square(self.shards.gather(weight, weight.detach())).clamp(min=group["eps"][1])
            weight.mul_(1 - rate * group["weight_decay"])
            slots = self.state[weight]
            slots["step"] += 1
            move = _direction(full, slots, slots["step"] ** group["beta2_decay"], group["eps"][0])
            clipping = (_root_mean_square(move) / group["d"]).clamp(min=1.0)
            length = size * slots["step"].rsqrt().clamp(max=rate) / clipping
            weight.sub_(self.shards.own_shard(weight, move.mul_(length)))


def _direction(gradient: torch.Tensor, slots: Slots, share: torch.Tensor, epsilon: float | None) -> torch.Tensor:
    """The gradient over the root of its second moment, which is updated by a share of the gradient's square."""
    least, share = torch.finfo(gradient.dtype).eps if epsilon is None else epsilon, share.to(gradient)
    if gradient.dim() < 2:
        moment = slots["variance"].lerp_(gradient.square(), share)
    else:
        rows, columns = slots["row_var"], slots["col_var"]
        rows.lerp_(gradient.norm(dim=-1, keepdim=True).square_() / gradient.size(-1), share)
        columns.lerp_(gradient.norm(dim=-2, keepdim=True).square_() / gradient.size(-2), share)
        moment = rows @ columns / rows.mean(dim=-2, keepdim=True).clamp(min=least)
    return moment.clamp(min=least * least).rsqrt_().mul_(gradient)


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(tensor.norm() / tensor.numel() ** 0.5)
