"""Fourier transforms against numpy's in double precision, windows against torch's, mel filters by their corners."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto

from onward.errors import NodeError
from tests.one_node import check_gradients, make_model, run, to_array

RANDOM = np.random.default_rng(0)


def parts(values: np.ndarray) -> np.ndarray:
    return np.stack([values.real, values.imag], -1)


def expected_dft(x: np.ndarray, length: int | None, axis: int, inverse: int, onesided: int) -> np.ndarray:
    signal = x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]
    if inverse and onesided:
        return np.fft.irfft(signal, length, axis)[..., None]
    if inverse:
        return parts(np.fft.ifft(signal, length, axis))
    if onesided and x.shape[-1] == 1:
        return parts(np.fft.rfft(signal, length, axis))
    return parts(np.fft.fft(signal, length, axis))


CASES = [
    (size, length, axis, inverse, onesided)
    for size in (1, 2)
    for length in (None, 3, 8)
    for axis in (1, -2, 0)
    for inverse, onesided in ((0, 0), (1, 0), (0, 1), (1, 1))
    if not (onesided and (size == 1) == bool(inverse))
]


@pytest.mark.parametrize(("size", "length", "axis", "inverse", "onesided"), CASES)
@pytest.mark.parametrize("opset", [17, 20])
def test_dft(size: int, length: int | None, axis: int, inverse: int, onesided: int, opset: int) -> None:
    x = RANDOM.standard_normal((4, 5, 2, size))
    attributes = {"inverse": inverse, "onesided": onesided} | ({"axis": axis} if opset == 17 else {})
    stored = {} if length is None else {"n": np.array(length)}
    inputs: dict[str, Any] = {"x": x, "n": None}
    if opset == 20:
        stored["axis"] = np.array(axis)
        inputs["axis"] = None
    model = make_model("DFT", inputs, attributes, opset, initializers=stored)
    expected = expected_dft(x, length, axis % 4 if axis < 0 else axis, inverse, onesided)
    np.testing.assert_allclose(to_array(run(model, x)), expected, rtol=1e-10, atol=1e-12)
    if axis == 1:
        check_gradients(model, x[:1])


def test_dft_default_axes_differ_by_version() -> None:
    """Axis 1 up to version 19, the last axis of the signal from 20 on."""
    x = RANDOM.standard_normal((2, 3, 4, 1))
    for opset, axis in ((17, 1), (20, 2)):
        actual = to_array(run(make_model("DFT", {"x": x}, opset=opset), x))
        np.testing.assert_allclose(actual, expected_dft(x, None, axis, 0, 0), rtol=1e-10, atol=1e-12)


def test_dft_refuses_the_axis_of_complex_parts() -> None:
    x = RANDOM.standard_normal((2, 3, 1))
    with pytest.raises(NodeError, match="axis 2 holds real and imaginary parts"):
        run(make_model("DFT", {"x": x}, {"axis": -1}, 17), x)
    wide = RANDOM.standard_normal((2, 3, 4))
    with pytest.raises(NodeError, match=r"real \(1\) or complex \(2\) numbers; its size is 4"):
        run(make_model("DFT", {"x": wide}, opset=17), wide)


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("how", ["window", "length", "both"])
def test_stft(onesided: int, size: int, how: str) -> None:
    """Frames cut by hand, each transformed by numpy."""
    if onesided and size == 2:
        pytest.skip("one side needs a real signal")
    x, window, step = RANDOM.standard_normal((2, 11, size)), RANDOM.uniform(0, 1, 4), 3
    inputs = {"x": x, "step": np.array(step), "w": window if how != "length" else None}
    stored = {} if how == "window" else {"n": np.array(4)}
    if "n" in stored:
        inputs["n"] = None
    model = make_model("STFT", inputs, {"onesided": onesided}, 17, initializers=stored)
    given = [value for value in inputs.values() if value is not None]
    frames = np.stack([x[:, s : s + 4] for s in range(0, 8, step)], 1)
    weighted = frames * (window if how != "length" else np.ones(4))[:, None]
    signal = weighted[..., 0] if size == 1 else weighted[..., 0] + 1j * weighted[..., 1]
    expected = parts(np.fft.rfft(signal) if onesided else np.fft.fft(signal))
    np.testing.assert_allclose(to_array(run(model, *given)), expected, rtol=1e-10, atol=1e-12)
    check_gradients(model, *given)


@pytest.mark.parametrize("periodic", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 9, 10])
@pytest.mark.parametrize("name", ["Hann", "Hamming", "Blackman"])
def test_windows(name: str, size: int, periodic: int) -> None:
    if size == 1:
        pytest.skip("the formula divides by zero") if not periodic else None
    attributes = {"periodic": periodic, "output_datatype": TensorProto.DOUBLE}
    actual = run(make_model(f"{name}Window", {"n": np.array(size)}, attributes, 17), np.array(size))
    options: dict[str, Any] = {"periodic": bool(periodic), "dtype": torch.float64}
    if name == "Hamming":
        options |= {"alpha": 25 / 46, "beta": 21 / 46}
    expected = getattr(torch, f"{name.lower()}_window")(size, **options)
    if size > 1:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert actual.shape == (size,)
    half = make_model(f"{name}Window", {"n": np.array(size)}, {"output_datatype": TensorProto.FLOAT16}, 17)
    assert run(half, np.array(size)).dtype == torch.float16


def test_mel_weight_matrix() -> None:
    """Every band is a triangle of height 1: it rises to its centre, where the next begins, and falls to the next's."""
    numbers = {"n": np.array(6), "d": np.array(512), "r": np.array(16000), "l": np.array(100.0), "h": np.array(6000.0)}
    model = make_model("MelWeightMatrix", numbers, {"output_datatype": TensorProto.DOUBLE}, 17)
    matrix = to_array(run(model, *numbers.values()))
    assert matrix.shape == (257, 6)
    assert (matrix.max(0) == 1).all()
    centres = matrix.argmax(0)
    edge = 2595 * np.log10(1 + np.array([100.0, 6000.0]) / 700)
    mels = edge[0] + (edge[1] - edge[0]) / 8 * np.arange(8)
    bins = np.floor(513 * 700 * (10 ** (mels / 2595) - 1) / 16000).astype(int)
    np.testing.assert_array_equal(centres, bins[1:7])
    for band in range(6):
        left, centre, right = bins[band : band + 3]
        np.testing.assert_allclose(matrix[left:centre, band], (np.arange(left, centre) - left) / (centre - left))
        np.testing.assert_allclose(matrix[centre:right, band], (right - np.arange(centre, right)) / (right - centre))
        assert not matrix[:left, band].any()
        assert not matrix[right:, band].any()
