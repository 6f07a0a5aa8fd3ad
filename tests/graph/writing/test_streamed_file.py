"""Files written tensor by tensor are those that protobuf writes; weights are fetched one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward.graph.reading.model_file import TRAINING_INFO
from onward.graph.writing.streamed_file import STREAMED_ABOVE_BYTES, write_streamed


def model_with_everything() -> onnx.ModelProto:
    """Large and small initializers of several types, a nested graph with one, a function, texts and metadata."""
    random = np.random.default_rng(0)
    large = numpy_helper.from_array(random.standard_normal((64, 64), np.float32), "large")
    large.doc_string = "a weight"
    half = helper.make_tensor("half", TensorProto.BFLOAT16, [5000], random.bytes(10_000), raw=True)
    four_bits = helper.make_tensor("four", TensorProto.INT4, [9001], random.bytes(4501), raw=True)
    inner_weight = numpy_helper.from_array(random.standard_normal((64, 64), np.float32), "inner")
    shape = ["n", 64]
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "inner"], ["b"], name="inside")],
        "branch",
        [],
        [helper.make_tensor_value_info("b", TensorProto.FLOAT, shape)],
        [inner_weight],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "large"], ["h"], name="m"),
        helper.make_node("twice", ["h"], ["t"], name="f", domain="own"),
        helper.make_node("If", ["is_on"], ["c"], name="choose", then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["t", "c"], ["y"], name="a"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [large, numpy_helper.from_array(np.array(True), "is_on"), half, four_bits],
        doc_string="of everything",
        value_info=[helper.make_tensor_value_info("h", TensorProto.FLOAT, shape)],
    )
    twice = helper.make_function(
        "own", "twice", ["v"], ["w"], [helper.make_node("Add", ["v", "v"], ["w"])], [helper.make_opsetid("", 21)]
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("own", 1)],
        functions=[twice],
        ir_version=10,
        producer_name="test",
    )
    helper.set_model_props(model, {"key": "value"})
    return model


def test_the_bytes_are_those_of_protobuf(tmp_path: Path) -> None:
    model = ir.from_proto(model_with_everything())
    write_streamed(model, tmp_path / "streamed.onnx")
    assert (tmp_path / "streamed.onnx").read_bytes() == ir.to_proto(model).SerializeToString()


def test_metadata_of_a_weight_are_written_once(tmp_path: Path) -> None:
    """onnx-ir 1.1 itself writes them twice where a tensor came from a file."""
    proto = model_with_everything()
    proto.graph.initializer[0].metadata_props.add(key="origin", value="here")
    write_streamed(ir.from_proto(proto), tmp_path / "streamed.onnx")
    written = onnx.load(tmp_path / "streamed.onnx")
    assert written.graph.initializer[0] == proto.graph.initializer[0]
    assert written.graph.node == ir.to_proto(ir.from_proto(proto)).graph.node


def test_a_model_without_large_weights_and_one_without_any(tmp_path: Path) -> None:
    for initializers in ([], [numpy_helper.from_array(np.zeros(2, np.float32), "w")]):
        node = helper.make_node("Identity", ["x"], ["y"])
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
        graph = helper.make_graph([node], "g", values[:1], values[1:], initializers)
        model = ir.from_proto(helper.make_model(graph))
        write_streamed(model, tmp_path / "m.onnx")
        assert (tmp_path / "m.onnx").read_bytes() == ir.to_proto(model).SerializeToString()


def test_training_info_is_written(tmp_path: Path) -> None:
    model = ir.from_proto(model_with_everything())
    info = onnx.TrainingInfoProto()
    info.initialization_binding.add(key="large", value="large")
    model.meta[TRAINING_INFO] = (info,)
    write_streamed(model, tmp_path / "m.onnx")
    expected = ir.to_proto(model)
    expected.training_info.append(info)
    assert (tmp_path / "m.onnx").read_bytes() == expected.SerializeToString()


def counted(tensor: ir.TensorProtocol, alive: list[str]) -> Callable[[], ir.TensorProtocol]:
    """Fetches a tensor, and notes that it was."""

    def fetch() -> ir.TensorProtocol:
        alive.append(str(tensor.name))
        return tensor

    return fetch


def test_a_lazy_tensor_is_fetched_once_and_the_model_stays_as_it_was(tmp_path: Path) -> None:
    model = ir.from_proto(model_with_everything())
    fetched: list[str] = []
    expected = ir.to_proto(model).SerializeToString()
    for name in ("large", "half"):
        value = model.graph.initializers[name]
        tensor = value.const_value
        assert tensor is not None
        assert tensor.nbytes > STREAMED_ABOVE_BYTES
        value.const_value = ir.LazyTensor(
            counted(tensor, fetched),
            dtype=tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
        )
    write_streamed(model, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == expected
    assert fetched == ["large", "half"]
    assert isinstance(model.graph.initializers["large"].const_value, ir.LazyTensor)


def test_a_tensor_of_another_length_than_it_said_is_refused(tmp_path: Path) -> None:
    model = ir.from_proto(model_with_everything())
    value = model.graph.initializers["large"]
    short = ir.tensor(np.zeros(3, np.float32))
    value.const_value = ir.LazyTensor(lambda: short, dtype=ir.DataType.FLOAT, shape=ir.Shape([64, 64]), name="large")
    with pytest.raises(ValueError, match=r"'large' has 12 bytes; expected 16384"):
        write_streamed(model, tmp_path / "m.onnx")
