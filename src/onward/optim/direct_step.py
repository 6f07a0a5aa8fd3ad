"""A step of torch's fused Adam and AdamW without the bookkeeping, which in a small network takes longer.

`Optimizer.step` checks and sorts every weight, its gradient and its moments by device and type at each call. Where all
are of one kind, the kernel that it ends in is called at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

_SLOTS = ("exp_avg", "exp_avg_sq", "step")


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, with the same bits."""
    calls = _kernel_calls(optimizer)
    if calls is None:
        optimizer.step()
        return
    overflowed: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    with torch.no_grad():
        for group, weights, (averages, squares, counts) in calls:
            _add(counts, 1)
            kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            kernel(
                weights,
                [weight.grad for weight in weights if weight.grad is not None],
                averages,
                squares,
                [],
                counts,
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=None,
                found_inf=overflowed,
            )
            if overflowed is not None:
                _add(counts, -overflowed)


def _add(counts: list[torch.Tensor], number: int | torch.Tensor) -> None:
    """Adds to all counts: at once where they are all the elements of one tensor."""
    together = counts[0]._base
    if together is not None and together.numel() == len(counts) and all(one._base is together for one in counts):
        together.add_(number)
    else:
        torch._foreach_add_(counts, number)


def take_step_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], weight: torch.Tensor) -> None:
    """`take_step` of one weight alone, which has a gradient and belongs to `group`."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [weight]}]
    try:
        take_step(optimizer)
    finally:
        optimizer.param_groups = groups


_Call = tuple[dict[str, Any], list[torch.Tensor], list[list[torch.Tensor]]]


def _kernel_calls(optimizer: torch.optim.Optimizer) -> list[_Call] | None:
    """Every group with its weights and their slots; None: the optimizer does more than to call one kernel for each."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or _has_hooks(optimizer):
        return None
    if getattr(optimizer, "grad_scale", None) is not None:
        return None
    overflowed, calls = getattr(optimizer, "found_inf", None), list[_Call]()
    for group in optimizer.param_groups:
        if not group["fused"] or any(group[name] for name in ("amsgrad", "maximize", "differentiable", "capturable")):
            return None
        weights = [weight for weight in group["params"] if weight.grad is not None]
        states = [optimizer.state[weight] for weight in weights]
        if not all(states) or isinstance(group["lr"], torch.Tensor) or not _are_alike(weights):
            return None
        if weights and overflowed is not None and overflowed.device != weights[0].device:
            return None
        if weights:
            calls.append((group, weights, [[state[slot] for state in states] for slot in _SLOTS]))
    return calls


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks)


def _are_alike(weights: list[torch.nn.Parameter]) -> bool:
    """Whether all are plain tensors of one type on one device, and so are their dense gradients."""
    for weight in weights:
        gradient = weight.grad
        if type(weight) is not torch.nn.Parameter or type(gradient) is not torch.Tensor:
            return False
        if not weight.device == gradient.device == weights[0].device:
            return False
        if not weight.dtype is gradient.dtype is weights[0].dtype or gradient.layout is not torch.strided:
            return False
    return True
