"""Operators that draw random numbers, from torch's own generator of the device.

A `seed` attribute is not used: the run's seed decides, so that a run is repeatable, a checkpoint can restore the
generator's state, and two steps, or two nodes with one seed, draw different numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onward.lowering.kernels.dropout import drop
from onward.lowering.kernels.dtypes import torch_dtype
from onward.lowering.registry import lowers


@lowers("Dropout", since=12, host=("ratio", "training_mode"))
def dropout(
    data: Tensor,
    ratio: float | None = None,
    training_mode: bool | None = None,
    *,
    seed: int | None = None,
    training: bool,
    owned: tuple[bool, ...],
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__Dropout.html; outputs the result and the mask of what was kept (bool).

    A `training_mode` that is an input of the graph decides; if it is absent or a constant of the model, the
    network's mode does. `seed` is not used (see the module).
    """
    decided = training_mode is not None and not owned[2]
    share = 0.5 if ratio is None else float(ratio)
    return _drop(data, share, bool(training_mode) if decided else training, output_count)


def _drop(data: Tensor, ratio: float, active: bool, output_count: int) -> tuple[Tensor, ...]:
    if not 0 <= ratio < 1:
        raise ValueError(f"ratio is {ratio}; expected a number from 0 up to, but not including, 1.")
    if not active or ratio == 0:
        return (data,) if output_count == 1 else (data, torch.ones_like(data, dtype=torch.bool))
    if output_count == 1:
        return (drop(data, ratio),)
    result, mask = torch.native_dropout(data, ratio, True)
    return result, mask


@lowers("Dropout", since=1)
def dropout_1(
    data: Tensor,
    *,
    is_test: int = 0,
    ratio: float = 0.5,
    training: bool,
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/text_diff_Dropout_10_12.html: the network's mode decides, `is_test` does not.

    Before version 10 the mask has the type of the data.
    """
    results = _drop(data, ratio, training, output_count)
    return results if output_count == 1 else (results[0], results[1].to(data.dtype))


@lowers("Dropout", since=10)
def dropout_10(data: Tensor, *, ratio: float = 0.5, training: bool, output_count: int) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/text_diff_Dropout_7_10.html: the mask is bool."""
    return _drop(data, ratio, training, output_count)


@lowers("RandomNormal", since=1)
def random_normal(
    *,
    dtype: int = 1,
    mean: float = 0.0,
    scale: float = 1.0,
    seed: float | None = None,
    shape: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__RandomNormal.html; `scale` is the deviation. `seed` is not used."""
    return torch.randn(shape, dtype=torch_dtype(dtype, "dtype"), device=device) * scale + mean


@lowers("RandomNormalLike", since=1)
def random_normal_like(
    input: Tensor, *, dtype: int | None = None, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__RandomNormalLike.html. `seed` is not used."""
    return torch.randn(input.shape, dtype=_dtype_like(input, dtype), device=input.device) * scale + mean


@lowers("RandomUniform", since=1)
def random_uniform(
    *,
    dtype: int = 1,
    high: float = 1.0,
    low: float = 0.0,
    seed: float | None = None,
    shape: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__RandomUniform.html; in [low, high). `seed` is not used."""
    return torch.rand(shape, dtype=torch_dtype(dtype, "dtype"), device=device) * (high - low) + low


@lowers("RandomUniformLike", since=1)
def random_uniform_like(
    input: Tensor, *, dtype: int | None = None, high: float = 1.0, low: float = 0.0, seed: float | None = None
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__RandomUniformLike.html. `seed` is not used."""
    return torch.rand(input.shape, dtype=_dtype_like(input, dtype), device=input.device) * (high - low) + low


@lowers("Bernoulli", since=15)
def bernoulli(input: Tensor, *, dtype: int | None = None, seed: float | None = None) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Bernoulli.html; input holds probabilities. `seed` is not used."""
    return torch.bernoulli(input).to(_dtype_like(input, dtype))


@lowers("Multinomial", since=7)
def multinomial(input: Tensor, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Multinomial.html; input (batch, classes) holds log-probabilities.

    They need not be normalized; the result (batch, sample_size) holds classes drawn with replacement.
    """
    probabilities = torch.softmax(input.to(torch.float32), dim=-1)
    drawn = torch.multinomial(probabilities, sample_size, replacement=True)
    return drawn.to(torch_dtype(dtype, "dtype"))


def _dtype_like(input: Tensor, dtype: int | None) -> torch.dtype:
    return input.dtype if dtype is None else torch_dtype(dtype, "dtype")
