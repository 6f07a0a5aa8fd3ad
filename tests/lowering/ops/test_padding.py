"""Pad, CenterCropPad and Col2Im: against numpy and onnxruntime, gradients by finite differences."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onward.engine.network.compilation import options_for
from onward.errors import NodeError
from onward.lowering.ops.padding import pad_axes
from tests.one_node import check_against_onnxruntime, check_gradients, ints, make_model, run, to_array

RANDOM = np.random.default_rng(0)
NUMPY_MODE = {"constant": "constant", "reflect": "reflect", "edge": "edge", "wrap": "wrap"}


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
@pytest.mark.parametrize("opset", [2, 7, 11, 13, 18, 21])
def test_pad_like_onnxruntime_at_every_version(mode: str, opset: int) -> None:
    x = RANDOM.standard_normal((2, 3, 5, 4)).astype(np.float32)
    pads = [0, 0, 2, 1, 0, 0, 1, 3]
    if opset < 11:
        model = make_model("Pad", {"x": x}, {"pads": pads, "mode": mode, "value": 1.5}, opset)
    else:
        stored = {"pads": ints(*pads), "value": np.array(1.5, np.float32)}
        model = make_model("Pad", {"x": x}, {"mode": mode}, opset, initializers=stored)
    check_against_onnxruntime(model, x)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint16, np.bool_])
@pytest.mark.parametrize("pads", [(1, 0, 2, 1, 0, 4), (0, 7, 0, 0, 5, 0), (0, 0, 3, 0, 0, 2)])
def test_pad_like_numpy(mode: str, dtype: type[np.generic], pads: tuple[int, ...]) -> None:
    """Any rank, any axis, and more than the tensor is long."""
    x = (RANDOM.standard_normal((3, 3, 4)) * 9).astype(dtype)
    model = make_model("Pad", {"x": x}, {"mode": mode}, 21, initializers={"pads": ints(*pads)})
    expected = np.pad(x, list(zip(pads[:3], pads[3:], strict=True)), mode=NUMPY_MODE[mode])  # type: ignore[call-overload]
    actual = to_array(run(model, x))
    assert actual.dtype == x.dtype
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
@pytest.mark.parametrize("pads", [(0, 2, 1, 1), (1, 1, 0, 2), (0, -1, 1, 2), (5, 0, 0, 0)])
def test_pad_gradients(mode: str, pads: tuple[int, ...]) -> None:
    x = RANDOM.standard_normal((3, 4))
    model = make_model("Pad", {"x": x}, {"mode": mode}, 19, initializers={"pads": ints(*pads)})
    check_gradients(model, x)
    image = x.reshape(1, 1, 3, 4)
    stored = {"pads": ints(*pads) if pads[0] != 5 else ints(2, 0, 0, 3), "value": np.array(0.5), "axes": ints(-2, 3)}
    check_gradients(make_model("Pad", {"x": image}, {"mode": mode}, 19, initializers=stored), image)


def test_pad_cuts_where_pads_are_negative() -> None:
    x = RANDOM.standard_normal((1, 1, 5)).astype(np.float32)
    for mode in ("constant", "edge"):
        model = make_model("Pad", {"x": x}, {"mode": mode}, 18, initializers={"pads": ints(0, 0, -1, 0, 0, 2)})
        check_against_onnxruntime(model, x)


def test_pad_1_calls_the_pads_paddings() -> None:
    x = torch.ones(1, 2)
    model = make_model("Pad", {"x": x}, {"paddings": [0, 1, 0, 1], "value": 2.0}, 1)
    assert run(model, x).tolist() == [[2.0, 1.0, 1.0, 2.0]]


def test_bad_pads_are_named() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(NodeError, match="3 pads for 2 axes"):
        run(make_model("Pad", {"x": x}, opset=18, initializers={"pads": ints(1, 2, 3)}), x)
    with pytest.raises(NodeError, match="mode 'mirror' is not known"):
        run(make_model("Pad", {"x": x}, {"mode": "mirror"}, 18, initializers={"pads": ints(1, 2, 3, 4)}), x)
    empty = torch.ones(2, 0)
    with pytest.raises(NodeError, match="axis 1 has size 0"):
        run(make_model("Pad", {"x": empty}, {"mode": "edge"}, 18, initializers={"pads": ints(0, 1, 0, 1)}), empty)


@pytest.mark.parametrize(("axes", "shape"), [(None, (3, 7)), ((1,), (4,)), ((-1, 0), (3, 9)), ((0,), (3,))])
def test_center_crop_pad(axes: tuple[int, ...] | None, shape: tuple[int, ...]) -> None:
    """The standard's text: what is too much goes half before and, rounded up, half after; so does what is missing."""
    x = RANDOM.standard_normal((6, 5))
    attributes: dict[str, Any] = {} if axes is None else {"axes": list(axes)}
    model = make_model("CenterCropPad", {"x": x}, attributes, 18, initializers={"shape": ints(*shape)})
    expected = x
    for axis, size in zip(axes or (0, 1), shape, strict=True):
        missing = size - expected.shape[axis]
        if missing < 0:
            start = -missing // 2
            expected = np.take(expected, range(start, start + size), axis)
        else:
            pads = [(0, 0), (0, 0)]
            pads[axis] = (missing // 2, missing - missing // 2)
            expected = np.pad(expected, pads)
    np.testing.assert_array_equal(to_array(run(model, x)), expected)
    check_gradients(model, x)


COLUMNS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((5, 6), (2, 3), {}),
    ((5, 6), (2, 3), {"pads": [1, 0, 1, 0], "strides": [2, 1]}),
    ((5, 6), (2, 3), {"pads": [1, 0, 0, 2], "dilations": [2, 1]}),
    ((7,), (3,), {"strides": [2], "pads": [1, 0]}),
    ((3, 4, 3), (2, 2, 1), {"strides": [1, 2, 1]}),
]


@pytest.mark.parametrize(("image", "block", "attributes"), COLUMNS)
def test_col2im_is_the_transpose_of_cutting_blocks(
    image: tuple[int, ...], block: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    """<cut(image), columns> = <image, Col2Im(columns)>, with blocks cut out one by one by the definition."""
    rank = len(image)
    pads = attributes.get("pads", [0] * 2 * rank)
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    picture = torch.from_numpy(RANDOM.standard_normal((2, 3, *image)))
    flat = [amount for axis in reversed(range(rank)) for amount in (pads[axis], pads[axis + rank])]
    padded = F.pad(picture, flat)
    steps = [range(0, padded.shape[2 + a] - dilations[a] * (block[a] - 1), strides[a]) for a in range(rank)]
    blocks = []
    for corner in np.ndindex(*(len(s) for s in steps)):
        cut = padded
        for axis in range(rank):
            start = steps[axis][corner[axis]]
            where = torch.arange(start, start + dilations[axis] * (block[axis] - 1) + 1, dilations[axis])
            cut = cut.index_select(2 + axis, where)
        blocks.append(cut.reshape(2, -1))
    cut_out = torch.stack(blocks, -1)
    columns = torch.from_numpy(RANDOM.standard_normal(tuple(cut_out.shape)))
    stored = {"image_shape": ints(*image), "block_shape": ints(*block)}
    model = make_model("Col2Im", {"x": columns}, attributes, 18, initializers=stored)
    back = run(model, columns)
    assert back.shape == picture.shape
    torch.testing.assert_close((back * picture).sum(), (cut_out * columns).sum(), rtol=1e-12, atol=1e-12)
    check_gradients(model, columns[:1, : int(np.prod(block))])


def test_padding_by_nothing_copies_nothing() -> None:
    """Exports of MobileNet put a Pad before every convolution, most of them by 0."""
    data = torch.randn(2, 3, 4, 4)
    assert pad_axes(data, [0] * 8, None, "constant", 0.0) is data
    assert pad_axes(data, [0, 0, 0, 0, 0, 0, 0, 1], None, "constant", 0.0).shape == (2, 3, 4, 5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")
def test_borders_of_computed_images_are_compiled() -> None:
    """torch's compiler refused reflected ones, whose places it could not bound, once they were joined with others."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        pads = ((0, 0, 1, 1, 0, 0, 1, 1), (0, 0, 9, 2, 0, 0, 20, 3))
        modes = ("reflect", "edge", "wrap")
        return [pad_axes(x * x + 1, amounts, None, mode, 0).sqrt() for mode in modes for amounts in pads]

    x = torch.randn(3, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    given = [x.clone().contiguous(memory_format=torch.channels_last).requires_grad_() for _ in range(2)]
    compiled = torch.compile(run, fullgraph=True, dynamic=False, options=options_for(torch.device("cpu")))
    results = [function(one) for function, one in zip((compiled, run), given, strict=True)]
    for each in results:
        torch.stack([result.square().mean() for result in each]).sum().backward()
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-5, atol=1e-6)
