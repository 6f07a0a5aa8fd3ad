"""Stored tensors that are not really there: too few bytes, impossible shapes, files that are missing or shared."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto

from onward.errors import ModelError
from onward.graph.reading.tensor_storage import check_tensors, close_file, stored_tensors


def model_of(tensor: onnx.TensorProto) -> ir.Model:
    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (y) { y = Add(x, w) }')
    proto.graph.initializer.append(tensor)
    return ir.from_proto(proto)


INLINE = {
    "bytes": (
        TensorProto(data_type=1, dims=[2], raw_data=b"1234567"),
        "(shape [2], FLOAT) needs 8 bytes; the file holds 7",
    ),
    "elements": (
        TensorProto(data_type=7, dims=[3], int64_data=[1, 2]),
        "(shape [3], INT64) needs 3 elements; the file",
    ),
    "half a byte": (TensorProto(data_type=22, dims=[3], raw_data=b"1"), "(shape [3], INT4) needs 2 bytes; the file"),
    "text": (
        TensorProto(data_type=8, dims=[1], raw_data=b"1"),
        "(shape [1], STRING) needs 1 elements; the file holds 0",
    ),
    "texts": (TensorProto(data_type=8, dims=[1], string_data=[b"a", b"b"]), "needs 1 elements; the file holds 2"),
    "negative": (TensorProto(data_type=1, dims=[-2, -2], raw_data=b""), "has the impossible shape [-2, -2]"),
    "huge": (TensorProto(data_type=1, dims=[2**40, 2**40], raw_data=b""), f"the impossible shape [{2**40}, {2**40}]"),
}


@pytest.mark.parametrize("case", INLINE)
def test_inline(case: str) -> None:
    tensor, words = INLINE[case]
    tensor.name = "w"
    with pytest.raises(ModelError) as caught:
        check_tensors(model_of(tensor), "the model", None)
    assert str(caught.value).startswith("the model: initializer 'w'")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "tensor", [TensorProto(data_type=1, dims=[0], raw_data=b""), TensorProto(data_type=22, dims=[3], raw_data=b"12")]
)
def test_empty_tensors_and_nibbles_are_fine(tensor: onnx.TensorProto) -> None:
    tensor.name = "w"
    check_tensors(model_of(tensor), "the model", None)


def external(folder: Path, location: str = "data", **more: int) -> ir.Model:
    given = {"offset": None, "length": 8, **more}
    model = model_of(TensorProto(name="w", data_type=1, dims=[2], raw_data=b"12345678"))
    model.graph.initializers["w"].const_value = ir.ExternalTensor(
        location, given["offset"], given["length"], ir.DataType.FLOAT, shape=ir.Shape([2]), name="w", base_dir=folder
    )
    return model


def test_external(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * 12)
    check_tensors(external(tmp_path, offset=4), "m", tmp_path)
    for changed, words in (
        ({"offset": 8}, "needs bytes 8 to 16 of 'data', which has only 12; the file is cut off"),
        ({"offset": -4}, "needs bytes -4 to 4"),
        ({"length": 4}, r"\(shape \[2\], FLOAT\) needs 8 bytes, but is said to take 4 in 'data'"),
    ):
        with pytest.raises(ModelError, match=words):
            check_tensors(external(tmp_path, **changed), "m", tmp_path)
    with pytest.raises(ModelError, match="stored in the file 'data', but a ModelProto has no folder"):
        check_tensors(external(tmp_path), "m", None)
    with pytest.raises(ModelError, match=r"cannot be read from its external data: "):
        check_tensors(external(tmp_path, "../data"), "m", tmp_path)
    with pytest.raises(ModelError, match="stored in 'none', which is missing; copy it next to the model"):
        check_tensors(external(tmp_path, "none"), "m", tmp_path)
    os.link(file, tmp_path / "other")
    with pytest.raises(ModelError, match="which has 2 hard links and may so belong to something outside"):
        check_tensors(external(tmp_path), "m", tmp_path)


def test_tensors_of_attributes_and_nested_graphs_are_found() -> None:
    inner = "() => (a) { a = Constant<value = float {1.0}>() }"
    text = f"y = If(c) <then_branch = g1 {inner}, else_branch = g2 {inner}>"
    model = ir.from_proto(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g (bool c) => (y) {{ {text} }}')
    )
    places = [place for place, _ in stored_tensors(model)]
    assert places == ["attribute 'value' of node 'a' (Constant)"] * 2
    close_file(None)
