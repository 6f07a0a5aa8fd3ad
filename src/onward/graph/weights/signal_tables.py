"""Tables that a file stores like weights and no training changes: Fourier bases, windows, mel filters, positions.

Told by name, or by numbers: rows that each hold one frequency under a window, triangles one after the other, columns
that are sines and cosines of the position.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

_NAME = re.compile(
    r"(^|[./_])((forward|inverse)_basis(_buffer)?|mel_(basis|filters?|fb|weight|matrix)|melscale[._/]fb|"
    r"cqt_kernels?_(real|imag)|dft_(real|imag)|(hann|hamming|blackman)_window|stft[._/]\w*window|window_sum)$"
)
"""How modules of signal processing name their tables."""

_LINEAR = {"Conv": 1, "ConvTranspose": 1, "MatMul": 1, "Gemm": 1}
"""Operator -> the input that a table of frequencies or of filters is."""

_LOOKING_UP = {"Gather", "Slice", "Add", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Identity", "Cast", "Split"}
"""What reads a table of positions, before it is added to what is at them."""

_LARGEST = 2**22
_SHORTEST = 64
_FEWEST = 8
_LEAST_ENERGY = 0.9
_LEAST_DIFFERENT = 0.25
"""The share of rows with their own frequency: a table has a cosine and a sine of each, a fill has one in all."""


def why_signal_table(value: ir.Value) -> str:
    """What table of signal processing an initializer is, or ""."""
    tensor = value.const_value
    if tensor is None:
        return ""
    if _NAME.search(str(value.name)):
        return "a table of signal processing by its name"
    if tensor.size > _LARGEST or tensor.size < _SHORTEST:
        return ""
    readers = {(use.node.op_type, use.idx) for use in value.uses()}
    if readers and readers <= {("Mul", 0), ("Mul", 1)}:
        return "a window function" if _is_window(np.asarray(tensor.numpy())) else ""
    if readers and {operator for operator, _ in readers} <= _LOOKING_UP:
        return "sines and cosines of positions" if _holds_positions(np.asarray(tensor.numpy())) else ""
    if not readers or not all(_LINEAR.get(operator) == index for operator, index in readers):
        return ""
    array = np.asarray(tensor.numpy())
    for rows in _as_rows(array, [operator for operator, _ in readers]):
        if _holds_frequencies(rows):
            return "a table of sines and cosines (a Fourier transform)"
        if _is_filter_bank(rows):
            return "a bank of triangular filters (mel)"
    return ""


def _as_rows(array: np.ndarray, operators: Sequence[str]) -> list[np.ndarray]:
    """The matrix of a table, one frequency or filter a row; of a product it may be either axis."""
    if set(operators) <= {"Conv", "ConvTranspose"}:
        inner = [size for size in array.shape[1:] if size > 1]
        return [array.reshape(len(array), -1)] if len(inner) == 1 and len(array) >= _FEWEST else []
    matrix = array.reshape(array.shape[-2:]) if array.ndim > 1 and array.size == np.prod(array.shape[-2:]) else None
    return [] if matrix is None else [matrix, matrix.T]


def _holds_frequencies(rows: np.ndarray) -> bool:
    """Whether each row that is not zero is one frequency under one window."""
    count, length = rows.shape
    if count < _FEWEST or length < _SHORTEST:
        return False
    # One row decides nearly always, without reading the rest.
    if not len(_frequencies(rows[count // 3 : count // 3 + 1])):
        return False
    found = _frequencies(rows)
    return len(found) > 0 and len(np.unique(found)) >= _LEAST_DIFFERENT * len(found)


def _frequencies(rows: np.ndarray) -> np.ndarray:
    """The frequency of each row that is not zero, in bins; empty where a row holds more than one."""
    none = np.empty(0, np.int64)
    rows = rows.astype(np.float64)
    rows = rows[np.abs(rows).max(1) > 1e-4 * max(float(np.abs(rows).max()), 1e-30)]
    if not len(rows):
        return none
    length = rows.shape[1]
    cumulated = np.cumsum(rows**2, axis=1)
    cumulated /= cumulated[:, -1:]
    support = (cumulated < 0.999).sum(1) - (cumulated < 0.001).sum(1) + 1
    spectrum = np.abs(np.fft.rfft(rows, axis=1)) ** 2
    bins = np.arange(spectrum.shape[1])
    highest = spectrum.argmax(1)
    near = np.abs(bins - highest[:, None]) <= 2.5 * (length / support)[:, None] + 1
    share = (spectrum * near).sum(1) / spectrum.sum(1)
    # A stretch so short that its frequency fills the spectrum shows nothing.
    return highest if bool((share > _LEAST_ENERGY).all()) and bool(near.mean() < 0.5) else none


def _holds_positions(array: np.ndarray) -> bool:
    """Whether each column is a sine or a cosine of the row's number, and their squares add up to half of the columns.

    As in Vaswani et al., 2017 (arXiv 1706.03762, section 3.5), in any order of columns; rows of zeros are padding.
    A sinusoid x is told by x[p - 1] + x[p + 1] = 2 cos(w) x[p], whatever its frequency w and its phase.
    """
    sizes = [size for size in array.shape if size > 1]
    if len(sizes) != 2 or min(sizes) < _FEWEST or float(np.abs(array).max()) > 1.001:
        return False
    rows = array.reshape(sizes).astype(np.float64)
    padding = np.flatnonzero(~rows.any(1))
    used = rows[padding[-1] + 1 :] if len(padding) else rows
    if len(used) < _FEWEST or not np.allclose((used**2).sum(1), sizes[1] // 2, atol=1e-3 * sizes[1]):
        return False
    middle, beside = used[1:-1], used[:-2] + used[2:]
    factors = (middle * beside).sum(0) / np.maximum((middle**2).sum(0), 1e-30)
    # Columns that hardly change fit any frequency near 0: a table has many others.
    is_told = len(np.unique(factors.round(6))) >= sizes[1] // 4
    return is_told and bool(np.abs(beside - factors * middle).max() < 1e-3)


def _is_filter_bank(rows: np.ndarray) -> bool:
    """Whether each row rises and falls once, is zero elsewhere, and the peaks move along."""
    count, length = rows.shape
    if count < _FEWEST or length < 2 * count or float(rows[0].min()) < 0 or float(rows.min()) < 0:
        return False
    used = rows > 0
    if not 0 < used.mean() < 0.25:
        return False
    filled = rows[used.any(1)].astype(np.float64)
    steps = np.sign(np.diff(np.pad(filled, ((0, 0), (1, 1))), axis=1))
    turns = [np.count_nonzero(np.diff(one[one != 0])) for one in steps]
    peaks = filled.argmax(1)
    return len(filled) >= _FEWEST and max(turns) == 1 and bool((np.diff(peaks) >= 0).all())


def _is_window(array: np.ndarray) -> bool:
    """Whether a vector is a window of usual form, periodic or symmetric."""
    vector = array.reshape(-1).astype(np.float64)
    if vector.size != max(array.shape, default=0):
        return False
    for shorter in (0, 1):
        angle = 2 * np.pi * np.arange(vector.size) / (vector.size - shorter)
        hann, hamming = 0.5 - 0.5 * np.cos(angle), 0.54 - 0.46 * np.cos(angle)
        blackman = 0.42 - 0.5 * np.cos(angle) + 0.08 * np.cos(2 * angle)
        if any(bool(np.allclose(vector, window, atol=1e-4)) for window in (hann, hamming, blackman)):
            return True
    return False
