"""Broken files of every kind give one ModelError that says what is wrong; good ones are read whatever their form."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper, parser

from onward.errors import ModelError
from onward.graph.reading.model_file import prepare_for_lowering, read_model


def _model(text: str) -> onnx.ModelProto:
    return parser.parse_model('<ir_version: 8, opset_import: ["" : 13]> g ' + text)


def _good() -> onnx.ModelProto:
    model = _model("(float[N, 3] x) => (float[N, 2] y) <float[2] b = {0.5, -0.5}> { h = MatMul(x, w) y = Add(h, b) }")
    model.graph.initializer.append(numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(3, 2), "w"))
    return model


def _message(source: object) -> str:
    with pytest.raises(ModelError) as raised:
        read_model(source)
    return str(raised.value)


def test_files_that_are_no_models(tmp_path: Path):
    """Missing, a directory, empty, text, and an image's first bytes: each named for what it is."""
    assert "does not exist; give the path of an .onnx file" in _message(tmp_path / "none.onnx")
    assert "is a directory" in _message(tmp_path)
    (tmp_path / "empty.onnx").touch()
    assert "is empty (0 bytes)" in _message(tmp_path / "empty.onnx")
    (tmp_path / "text.onnx").write_text("hello, this is not a model\n" * 20)
    assert "(540 bytes) is not an ONNX file, or is cut off" in _message(tmp_path / "text.onnx")
    (tmp_path / "image.onnx").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert "image.onnx" in _message(tmp_path / "image.onnx")
    (tmp_path / "m.json").write_text('{"graph": 3}')
    assert "is not an ONNX file" in _message(tmp_path / "m.json")
    assert "'a\\x00b' cannot be opened" in _message("a\0b") or "does not exist" in _message("a\0b")


def test_truncated_at_every_byte(tmp_path: Path):
    """A file cut anywhere is refused, or is an entire model that only lost its trailing metadata."""
    data = _good().SerializeToString()
    path = tmp_path / "m.onnx"
    refused = 0
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        try:
            read_model(path)
        except ModelError:
            refused += 1
    assert refused >= len(data) - 3


def test_random_bytes(tmp_path: Path):
    """200 files of random bytes: nothing but ModelError."""
    source = random.Random(0)
    path = tmp_path / "m.onnx"
    for _ in range(200):
        path.write_bytes(source.randbytes(source.randrange(1, 300)))
        _message(path)


def test_other_forms_of_a_model(tmp_path: Path):
    """Binary, text, a ModelProto and an onnx-ir model read alike, and the given one is left alone."""
    proto = _good()
    onnx.save(proto, tmp_path / "m.onnx")
    onnx.save(proto, tmp_path / "m.textproto")
    for source in (
        tmp_path / "m.onnx",
        str(tmp_path / "m.onnx"),
        tmp_path / "m.textproto",
        proto,
        ir.from_proto(proto),
    ):
        model = read_model(source)
        assert list(model.graph.initializers) == ["b", "w"]
        model.graph.remove(list(model.graph)[-1], safe=False)
    assert [node.op_type for node in proto.graph.node] == ["MatMul", "Add"]


def _external(tmp_path: Path) -> tuple[Path, onnx.ModelProto]:
    onnx.save(_good(), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    return tmp_path / "m.onnx", onnx.load(tmp_path / "m.onnx", load_external_data=False)


def _point(proto: onnx.ModelProto, key: str, value: str) -> None:
    for entry in proto.graph.initializer[1].external_data:
        if entry.key == key:
            entry.value = value


def test_external_data_stay_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They are found next to the model whatever the working directory, and are not read before they are used."""
    path, _ = _external(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = read_model("m.onnx")
    monkeypatch.chdir("/")
    tensor = prepare_for_lowering(model).graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert tensor.raw is None
    np.testing.assert_array_equal(tensor.numpy(), np.arange(6, dtype=np.float32).reshape(3, 2))
    assert "a ModelProto has no folder" in _message(onnx.load(path, load_external_data=False))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("location", "gone.data", "'w' is stored in 'gone.data', which is missing; copy it next to the model"),
        ("location", "../m.data", "\'../m.data\' is outside of the folder"),
        ("location", "/etc/hostname", "\'/etc/hostname\' is outside of the folder"),
        ("location", "link.data", "\'link.data\' is outside of the folder"),
        ("location", "hard.data", "has 2 hard links"),
        ("location", ".", "'.' is outside of the folder"),
        ("offset", "4096", "needs bytes 4096 to 4120 of 'm.data', which has only"),
        ("offset", "-8", "cannot be read: "),
        ("offset", "many", "cannot be read"),
        ("length", "23", "(shape [3, 2], FLOAT) needs 24 bytes, but is said to take 23 in 'm.data'"),
        ("length", "9999999", "is said to take 9999999"),
    ],
)  # fmt: skip
def test_wrong_external_data(key: str, value: str, words: str, tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    path, proto = _external(folder)
    (tmp_path / "m.data").write_bytes(bytes(100))
    (folder / "link.data").symlink_to(tmp_path / "m.data")
    (tmp_path / "other").write_bytes(bytes(100))
    os.link(tmp_path / "other", folder / "hard.data")
    _point(proto, key, value)
    path.write_bytes(proto.SerializeToString())
    assert words in _message(path)


def test_external_data_cut_off(tmp_path: Path):
    path, _ = _external(tmp_path)
    os.truncate(tmp_path / "m.data", 20)
    assert "which has only 20; the file is cut off" in _message(path)


def test_inline_data_of_the_wrong_length():
    proto = _good()
    proto.graph.initializer[1].raw_data = bytes(23)
    assert "initializer 'w' (shape [3, 2], FLOAT) needs 24 bytes; the file holds 23" in _message(proto)
    proto = _good()
    proto.graph.initializer[0].ClearField("raw_data")
    proto.graph.initializer[0].float_data[:] = [1.0]
    assert "initializer 'b' (shape [2], FLOAT) needs 2 elements; the file holds 1" in _message(proto)
    proto = _good()
    proto.graph.initializer[1].data_type = 99
    assert "the tensor 'w' has the element type 99, unknown to ONNX" in _message(proto)


@pytest.mark.parametrize("dims", [[2**31, 2**31, 4], [2**62, 2**62], [-1, 6], [3, -2]])
def test_impossible_shapes(dims: list[int], tmp_path: Path):
    """Sizes whose product overflows, and negative ones, inline and external."""
    proto = _good()
    proto.graph.initializer[1].dims[:] = dims
    assert "initializer 'w'" in _message(proto)
    path, proto = _external(tmp_path)
    proto.graph.initializer[1].dims[:] = dims
    path.write_bytes(proto.SerializeToString())
    assert "initializer 'w'" in _message(path)


def test_opsets():
    proto = _good()
    proto.opset_import[0].version = 99
    assert "is written for opset 99; opsets 1 to 28 are known. Convert it" in _message(proto)
    del proto.opset_import[:]
    assert "imports no opset of the standard domain" in _message(proto)


def test_structure():
    """Cycles, missing inputs, duplicate names, absent outputs: the node and the value are named."""
    assert "form a cycle, through 'a', 'b'" in _message(
        _model("(float[N] x) => (float[N] a) { a = Add(x, b) b = Relu(a) c = Relu(b) }")
    )
    assert "node 'y' (Add) reads 'bais' as input 1, which is neither" in _message(
        _model("(float[N] x, float[N] bias) => (float[N] y) { y = Add(x, bais) }")
    )
    assert "did you mean 'bias'?" in _message(
        _model("(float[N] x, float[N] bias) => (float[N] y) { y = Add(x, bais) }")
    )
    twice = _good()
    twice.graph.node.append(helper.make_node("Relu", ["x"], ["h"], name="again"))
    assert "node 'again' (Relu) computes 'h', which is also an output of node 'h' (MatMul)" in _message(twice)
    twice = _good()
    twice.graph.initializer.append(twice.graph.initializer[0])
    assert "has two initializers named 'b'" in _message(twice)
    nothing = _good()
    del nothing.graph.output[:]
    assert "has no outputs" in _message(nothing)
    nothing = _good()
    nothing.graph.output[0].name = "z"
    assert "nothing computes the output 'z' of graph 'g'" in _message(nothing)
    assert "holds no graph" in _message(onnx.ModelProto())


def test_unsorted_nodes_are_sorted():
    """Some tools write nodes in any order; the standard wants them sorted."""
    model = read_model(_model("(float[N] x) => (float[N] y) { y = Relu(h) h = Neg(x) }"))
    assert [node.op_type for node in model.graph] == ["Neg", "Relu"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(float[N] x) => (float[N] y) { y = Add(x) }", "node 'y' (Add) has 1 inputs; the operator takes 2."),
        ("(float[N] x) => (float[N] y) { y = Clip(x, x, x, x) }", "has 4 inputs; the operator takes 1 to 3."),
        ("(float[N] x) => (float[N] y) { y, z = Relu(x) }", "node 'y' (Relu) has 2 outputs; the operator gives 1."),
        (
            "(float[N] x) => (float[N] y) { y = Relu<alpha = 1.0>(x) }",
            "has the attribute 'alpha'; Relu of version 13 knows: none.",
        ),
        (
            "(float[N] x) => (float[N] y) { y = Softmax<axis = 1.5>(x) }",
            "its attribute 'axis' is of kind FLOAT; expected INT.",
        ),
        ("(float[N] x) => (float[N] y) { y = Cast(x) }", "node 'y' (Cast) lacks its attribute 'to'."),
    ],
)
def test_arity_and_attributes(text: str, words: str):
    assert words in _message(_model(text))


def test_functions_that_call_themselves():
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13, "own" : 1]> g (float[N] x) => (float[N] y) { y = own.f(x) }
        <domain: "own", opset_import: ["" : 13, "own" : 1]> f (a) => (b) { b = own.f(a) }"""
    )
    with pytest.raises(ModelError, match=r"the function own::f calls itself, which ONNX does not allow"):
        prepare_for_lowering(read_model(proto))


def test_preparation_lifts_everything():
    """Constants, weights listed as inputs, tensors of branches and functions: all initializers of the main graph."""
    proto = parser.parse_model(
        """<ir_version: 3, opset_import: ["" : 13, "own" : 1]>
        g (float[N] x, bool c, float[1] listed) => (float[N] y) <float[1] listed = {3.0}>
        {
            k = Constant<value_floats = [1.0, 2.0]>()
            h = own.scale(x)
            i = If(c) <
                then_branch = t () => (float[N] a) { w = Constant<value = float[1] {7.0}>() a = Add(x, w) },
                else_branch = e () => (float[1] v) <float[1] v = {8.0}> { }
            >
            s = Add(h, i)
            l = Mul(s, listed)
            y = Add(l, k)
        }
        <domain: "own", opset_import: ["" : 13]> scale (a) => (b)
        { two = Constant<value_float = 2.0>() b = Mul(a, two) }
        """
    )
    model = prepare_for_lowering(read_model(proto))
    assert {"k", "listed", "w", "v"} <= set(model.graph.initializers)
    assert [value.name for value in model.graph.inputs] == ["x", "c"]
    assert len(model.functions) == 0
    for graph in model.graph.subgraphs():
        assert not graph.initializers
        assert all(output.producer() is not None for output in graph.outputs)


def test_equal_names_in_two_branches():
    """Each branch has its own `w`; they become two initializers, and the source keeps its names."""
    source = read_model(
        parser.parse_model(
            """<ir_version: 8, opset_import: ["" : 13]> g (float[N] x, bool c) => (float[N] y)
            {
                y = If(c) <
                    then_branch = t () => (float[N] a) <float[1] w = {7.0}> { a = Add(x, w) },
                    else_branch = e () => (float[N] b) <float[1] w = {8.0}> { b = Add(x, w) }
                >
            }"""
        )
    )
    lifted = prepare_for_lowering(source).graph.initializers
    assert {name: float(value.const_value.numpy()[0]) for name, value in lifted.items()} == {"w": 7.0, "w_1": 8.0}
    again = ir.to_proto(source).graph.node[0].attribute
    assert [a.g.initializer[0].name for a in again] == ["w", "w"]


def test_initializers_without_data_or_of_impossible_shapes():
    model = ir.from_proto(_good())
    model.graph.initializers["w"].const_value = None
    assert "the initializer 'w' holds no data" in _message(model)
    proto = _good()
    proto.graph.initializer[1].dims[:] = [2**40, 2**40]
    assert "initializer 'w' has the impossible shape [1099511627776, 1099511627776]" in _message(proto)
