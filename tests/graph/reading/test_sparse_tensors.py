"""Sparse tensors of a file compute, train and are exported as the dense tensors that they stand for.

The numbers are numpy's: onnxruntime 1.31 has the same, but crashed once at a sparse constant inside of a function.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import onward
from onward.errors import ModelError
from onward.graph.reading.lazy_file import read_model_lazily
from onward.graph.reading.model_file import read_model
from onward.graph.training_graph import make_training_graph
from tests.one_node import run_onnxruntime

VALUES = np.array([0.5, -2.0, 3.0], np.float32)
PLACES = np.array([1, 4, 11])
SHAPE = [3, 4]


def _sparse(name: str, values: Any = VALUES, indices: Any = PLACES, shape: Any = SHAPE) -> onnx.SparseTensorProto:
    tensors = numpy_helper.from_array(np.asarray(values), name), numpy_helper.from_array(np.asarray(indices), "indices")
    return helper.make_sparse_tensor(*tensors, shape)


def _model(sparse: onnx.SparseTensorProto | None = None, indices: Any = PLACES) -> onnx.ModelProto:
    """x (n, 3) times a sparse initializer w (3, 4), minus a sparse Constant (3, 4) in each branch of an If."""
    branches = []
    for name in ("then", "else"):
        output = helper.make_tensor_value_info(f"{name}_k", onnx.TensorProto.FLOAT, SHAPE)
        value = _sparse("", VALUES if name == "then" else VALUES + 1, indices)
        constant = helper.make_node("Constant", [], [f"{name}_s"], sparse_value=value)
        negated = helper.make_node("Neg", [f"{name}_s"], [output.name])
        branches.append(helper.make_graph([constant, negated], name, [], [output]))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("If", ["c"], ["k"], then_branch=branches[0], else_branch=branches[1]),
        helper.make_node("Add", ["h", "k"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [3, 3]),
        helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []),
    ]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, SHAPE)]
    graph = helper.make_graph(nodes, "sparse", inputs, outputs, sparse_initializer=[sparse or _sparse("w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def _dense(values: np.ndarray[Any, Any] = VALUES) -> np.ndarray[Any, Any]:
    dense = np.zeros(12, values.dtype)
    dense[PLACES] = values
    return dense.reshape(SHAPE)


@pytest.mark.parametrize("indices", [PLACES, np.stack(np.unravel_index(PLACES, SHAPE), 1)], ids=["linear", "by axis"])
@pytest.mark.parametrize("flag", [True, False])
def test_sparse_initializers_and_constants_equal_dense_ones(flag: bool, indices: Any, tmp_path: Path) -> None:
    model = _model(_sparse("w", indices=indices), indices)
    x, c = np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32), np.array(flag)
    net = onward.to_torch(model)
    y = x @ _dense() - _dense(VALUES if flag else VALUES + 1)
    np.testing.assert_allclose(net(torch.from_numpy(x), torch.from_numpy(c)).detach(), y, rtol=1e-6, atol=1e-6)
    assert model.graph.sparse_initializer[0].values.name == "w", "the user's message was changed"
    assert "w" in net.weights

    net(torch.from_numpy(x), torch.from_numpy(c)).square().sum().backward()
    np.testing.assert_allclose(net.weights["w"].grad, x.T @ (2 * y), rtol=1e-5, atol=1e-6)

    with torch.no_grad():
        net.weights["w"].add_(1)
    onward.export(net, tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    expected = x @ (_dense() + 1) - _dense(VALUES if flag else VALUES + 1)
    np.testing.assert_allclose(run_onnxruntime(trained, x, c)[0], expected, rtol=1e-5, atol=1e-6)
    assert [tensor.name for tensor in trained.graph.initializer] == ["w"]


@pytest.mark.parametrize("dtype", ["int64", "float64", "bool", "float16", "bfloat16"])
def test_a_sparse_constant_of_every_kind_equals_a_dense_one(dtype: str) -> None:
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) if dtype != "bfloat16" else onnx.TensorProto.BFLOAT16
    values = helper.make_tensor("", code, [3], [1, 0, 2] if dtype != "bool" else [1, 0, 1])
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(PLACES), SHAPE)
    nodes = [
        helper.make_node("Constant", [], ["k"], sparse_value=sparse),
        helper.make_node("Cast", ["k"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    graph = helper.make_graph(nodes, "g", [], [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, SHAPE)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    expected = _dense(np.array([1, 0, 1 if dtype == "bool" else 2], np.float32))
    np.testing.assert_array_equal(onward.to_torch(model)().detach(), expected)


def test_a_file_read_lazily_and_a_function_hold_sparse_tensors(tmp_path: Path) -> None:
    model = _model()
    onnx.save(model, tmp_path / "m.onnx")
    found = read_model_lazily(tmp_path / "m.onnx").graph.initializers["w"].const_value
    assert found is not None
    np.testing.assert_array_equal(found.numpy(), _dense())
    constant = helper.make_node("Constant", [], ["k"], sparse_value=_sparse(""))
    body = [constant, helper.make_node("Mul", ["a", "k"], ["b"])]
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13, "own" : 1]> g (float[3, 4] x) => (float[3, 4] y) { y = own.f(x) }'
    )
    model.functions.append(helper.make_function("own", "f", ["a"], ["b"], body, [helper.make_opsetid("", 13)]))
    x = np.ones(SHAPE, np.float32)
    np.testing.assert_array_equal(onward.to_torch(model)(torch.from_numpy(x)).detach(), _dense())


def test_a_sparse_weight_is_said() -> None:
    notes = make_training_graph(_model(), weights_not_to_train=["*_s"]).notes
    assert notes == (
        "the weight 'w' was stored sparse, 3 of its 12 elements; all of them train, and export writes it as a dense "
        "tensor.",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"indices": [1, 4]},
            r"indices of shape \[2\] for 3 values and the shape \[3, 4\]; expected \[3\] or \[3, 2\]",
        ),
        ({"indices": [1, 4, 12]}, r"index 2 at 12, outside of the shape \[3, 4\]"),
        ({"indices": [[0, 1], [1, 4], [2, 2]]}, r"index 1 at \[1, 4\], outside of the shape \[3, 4\]"),
        ({"indices": [-1, 4, 5]}, "index 0 at -1, outside"),
        ({"indices": [1, 1, 5]}, "indices out of order at index 1; the standard has them ascend"),
        ({"indices": np.array([1, 4, 5], np.int32)}, "at int32 indices; expected a list of numbers at int64"),
        ({"values": VALUES.reshape(3, 1)}, r"values of shape \[3, 1\]"),
        ({"values": np.array(["a", "b", "c"])}, "holds object values"),
        ({"shape": [3, -4]}, r"the shape \[3, -4\], with a negative size"),
        ({"shape": [2**31, 2**31]}, r"18,446,744,073,709,551,616 bytes as the dense tensor .* at most 2,147,483,647"),
    ],
)
def test_broken_sparse_tensors_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"the given ModelProto: the sparse initializer 'w' .*{message}"):
        read_model(_model(_sparse("w", **change)))


def test_sparse_tensors_in_other_files_and_names_given_twice_are_refused() -> None:
    outside = _sparse("w")
    outside.values.data_location = onnx.TensorProto.EXTERNAL
    with pytest.raises(ModelError, match="'w' has its data in another file"):
        read_model(_model(outside))
    twice = _model()
    twice.graph.initializer.append(numpy_helper.from_array(_dense(), "w"))
    with pytest.raises(ModelError, match="two initializers named 'w'"):
        read_model(twice)
