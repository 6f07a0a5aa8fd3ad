"""The domain ai.onnx.preview.training: weight updates (Adam, Adagrad, Momentum) and gradients as operators.

The inputs of an update are the learning rate R, the update count T, and then, for n tensors, n values, n gradients
and n of each slot; its outputs are n new values and n of each new slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onward.lowering.registry import lowers

_DOMAIN = "ai.onnx.preview.training"


def _groups(inputs: Sequence[Tensor], names: tuple[str, ...]) -> list[tuple[Tensor, ...]]:
    """Per tensor its value, gradient and slots."""
    if len(inputs) % len(names):
        raise ValueError(f"{len(inputs)} tensors do not divide into equally many of {', '.join(names)}.")
    count = len(inputs) // len(names)
    return list(zip(*(inputs[i * count : (i + 1) * count] for i in range(len(names))), strict=True))


def _arrange(results: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """All new values, then all of each slot."""
    return tuple(tensor for group in zip(*results, strict=True) for tensor in group)


@lowers("Gradient", since=1, domain=_DOMAIN)
def gradient(
    *Inputs: Tensor,
    body: Callable[..., tuple[Tensor, ...]],
    xs: tuple[str, ...],
    y: str,
    zs: tuple[str, ...] = (),
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx_aionnxpreviewtraining_Gradient.html

    The gradient of the sum of y, with respect to each of xs, where xs and zs take the values of the inputs. `body`
    computes y from xs and zs; it is no attribute of the standard (`onward.graph.reading.differentiated` adds it).
    """
    fixed = Inputs[len(xs) :]
    differentiated = torch.func.vjp(lambda *varied: body(*varied, *fixed)[0], *Inputs[: len(xs)])
    value, pull_back = differentiated[0], differentiated[1]
    return tuple(pull_back(torch.ones_like(value)))


@lowers("Adam", since=1, domain=_DOMAIN)
def adam(
    R: Tensor,
    T: Tensor,
    *inputs: Tensor,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx_aionnxpreviewtraining_Adam.html

    No bias correction at T = 0; epsilon is added to the square root of the uncorrected H. The correction is computed
    in float64: a small difference of numbers close to 1.
    """
    count = T.clamp(min=1).to(torch.float64)  # at 0 the fraction, though not taken, would spoil the gradient
    rate = torch.where(T > 0, R * torch.sqrt(1 - beta**count) / (1 - alpha**count), R)
    results = []
    for X, G, V, H in _groups(inputs, ("values", "gradients", "averaged gradients", "averaged squared gradients")):
        regularized = norm_coefficient * X + G
        V_new = alpha * V + (1 - alpha) * regularized
        H_new = beta * H + (1 - beta) * regularized * regularized
        X_new = X - rate.to(X.dtype) * V_new / (torch.sqrt(H_new) + epsilon)
        results.append(((1 - norm_coefficient_post) * X_new, V_new, H_new))
    return _arrange(results)


@lowers("Adagrad", since=1, domain=_DOMAIN)
def adagrad(
    R: Tensor,
    T: Tensor,
    *inputs: Tensor,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx_aionnxpreviewtraining_Adagrad.html"""
    rate = R / (1 + T * decay_factor)
    results = []
    for X, G, H in _groups(inputs, ("values", "gradients", "squared gradients")):
        regularized = norm_coefficient * X + G
        H_new = H + regularized * regularized
        results.append((X - rate.to(X.dtype) * regularized / (torch.sqrt(H_new) + epsilon), H_new))
    return _arrange(results)


@lowers("Momentum", since=1, domain=_DOMAIN)
def momentum(
    R: Tensor,
    T: Tensor,
    *inputs: Tensor,
    alpha: float,
    beta: float,
    mode: str,
    norm_coefficient: float,
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx_aionnxpreviewtraining_Momentum.html"""
    if mode not in ("standard", "nesterov"):
        raise ValueError(f"mode is {mode!r}; it must be standard or nesterov.")
    gradient_share = torch.where(T > 0, beta, 1.0)
    results = []
    for X, G, V in _groups(inputs, ("values", "gradients", "momenta")):
        regularized = norm_coefficient * X + G
        V_new = alpha * V + gradient_share.to(X.dtype) * regularized
        direction = regularized + alpha * V_new if mode == "nesterov" else V_new
        results.append((X - R.to(X.dtype) * direction, V_new))
    return _arrange(results)
