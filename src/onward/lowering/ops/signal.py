"""Fourier transforms, windows and mel filters.

A complex number is a last axis of size 2: real and imaginary part. Half floats are transformed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onward.lowering.kernels.dtypes import torch_dtype
from onward.lowering.kernels.host import HostValue
from onward.lowering.kernels.host import flatten as numbers_of
from onward.lowering.ops.movement import normalize_axis
from onward.lowering.registry import lowers


def _as_signal(input: Tensor) -> Tensor:
    """The real or complex tensor that a last axis of size 1 or 2 stands for."""
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    if input.shape[-1] == 1:
        return wide.squeeze(-1)
    if input.shape[-1] == 2:
        complex_signal: Tensor = torch.view_as_complex(wide.contiguous())
        return complex_signal
    raise ValueError(f"the last axis holds real (1) or complex (2) numbers; its size is {input.shape[-1]}.")


def _transform(input: Tensor, length: int | None, axis: int, inverse: bool, onesided: bool) -> Tensor:
    axis = normalize_axis(axis, input.dim())
    if axis == input.dim() - 1:
        raise ValueError(f"axis {axis} holds real and imaginary parts; it cannot be transformed.")
    signal = _as_signal(input)
    result: Tensor
    if inverse and onesided:
        result = torch.fft.irfft(signal, length, axis).unsqueeze(-1)
        return result.to(input.dtype)
    if inverse:
        result = torch.fft.ifft(signal, length, axis)
    elif onesided and not signal.is_complex():
        result = torch.fft.rfft(signal, length, axis)
    else:
        result = torch.fft.fft(signal, length, axis)
        result = result.narrow(axis, 0, result.shape[axis] // 2 + 1) if onesided else result
    return torch.view_as_real(result.resolve_conj()).to(input.dtype)


@lowers("DFT", since=20, host=("dft_length", "axis"))
def dft(
    input: Tensor,
    dft_length: HostValue | None = None,
    axis: HostValue = -2,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__DFT.html; from 20 on the axis is an input."""
    length = None if dft_length is None else numbers_of(dft_length)[0]
    along = -2 if axis is None else numbers_of(axis)[0]
    return _transform(input, length, along, bool(inverse), bool(onesided))


@lowers("DFT", since=17, host=("dft_length",))
def dft_17(
    input: Tensor, dft_length: HostValue | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__DFT.html; up to version 19 the axis is an attribute, 1 by default."""
    length = None if dft_length is None else numbers_of(dft_length)[0]
    return _transform(input, length, axis, bool(inverse), bool(onesided))


@lowers("STFT", since=17, host=("frame_step", "frame_length"))
def stft(
    signal: Tensor,
    frame_step: HostValue,
    window: Tensor | None = None,
    frame_length: HostValue | None = None,
    *,
    onesided: int = 1,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__STFT.html; signal (batch, length, 1 or 2), no padding at the ends."""
    length = signal.shape[1] if window is None else window.shape[0]
    if frame_length is not None:
        given = numbers_of(frame_length)[0]
        if window is not None and given != length:
            raise ValueError(f"frame_length is {given}, but the window has {length} values.")
        length = given
    frames = _as_signal(signal).unfold(1, length, numbers_of(frame_step)[0])
    if window is not None:
        frames = frames * window.to(torch.promote_types(window.dtype, torch.float32))
    if not onesided:
        result = torch.fft.fft(frames)
    elif frames.is_complex():
        raise ValueError("onesided=1 needs a real signal and a real window.")
    else:
        result = torch.fft.rfft(frames)
    return torch.view_as_real(result).to(signal.dtype)


def _cosine_window(
    size: HostValue, weights: Sequence[float], periodic: int, output_datatype: int, device: torch.device
) -> Tensor:
    """A sum of cosines with alternating signs, computed in double precision."""
    count = int(numbers_of(size)[0])
    steps = torch.arange(count, dtype=torch.float64, device=device)
    period = max(count if periodic else count - 1, 1)
    window = torch.zeros_like(steps)
    for order, weight in enumerate(weights):
        window = window + (-1) ** order * weight * torch.cos(2 * math.pi * order * steps / period)
    return window.to(torch_dtype(output_datatype, "attribute 'output_datatype'"))


@lowers("HannWindow", since=17, host=("size",))
def hann_window(size: HostValue, *, output_datatype: int = 1, periodic: int = 1, device: torch.device) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__HannWindow.html"""
    return _cosine_window(size, (0.5, 0.5), periodic, output_datatype, device)


@lowers("HammingWindow", since=17, host=("size",))
def hamming_window(size: HostValue, *, output_datatype: int = 1, periodic: int = 1, device: torch.device) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__HammingWindow.html; weights 25/46 and 21/46."""
    return _cosine_window(size, (25 / 46, 21 / 46), periodic, output_datatype, device)


@lowers("BlackmanWindow", since=17, host=("size",))
def blackman_window(size: HostValue, *, output_datatype: int = 1, periodic: int = 1, device: torch.device) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__BlackmanWindow.html"""
    return _cosine_window(size, (0.42, 0.5, 0.08), periodic, output_datatype, device)


@lowers(
    "MelWeightMatrix",
    since=17,
    host=("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz"),
)
def mel_weight_matrix(
    num_mel_bins: HostValue,
    dft_length: HostValue,
    sample_rate: HostValue,
    lower_edge_hertz: HostValue,
    upper_edge_hertz: HostValue,
    *,
    output_datatype: int = 1,
    device: torch.device,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__MelWeightMatrix.html; triangles of height 1, edges on integer DFT bins."""
    bands, length, rate = (int(numbers_of(value)[0]) for value in (num_mel_bins, dft_length, sample_rate))
    low, high = (_to_mel(numbers_of(value)[0]) for value in (lower_edge_hertz, upper_edge_hertz))
    step = (high - low) / (bands + 2)
    edges = [int((length + 1) * _to_hertz(low + step * band) // rate) for band in range(bands + 2)]
    matrix = torch.zeros(length // 2 + 1, bands, dtype=torch.float64)
    for band in range(bands):
        left, center, right = edges[band : band + 3]
        for row in range(left, center):
            matrix[row, band] = (row - left) / (center - left)
        for row in range(center, max(right, center + 1)):
            matrix[row, band] = (right - row) / (right - center) if right > center else 1.0
    return matrix.to(device=device, dtype=torch_dtype(output_datatype, "attribute 'output_datatype'"))


def _to_mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)


def _to_hertz(mel: float) -> float:
    return 700 * (10 ** (mel / 2595) - 1)
