"""Other numbers in the codes of a quantized weight: as close as its format allows, and the same codes for the same."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from onward.graph.packed_weights.requantization import find_stored_weight

K, N = 96, 40
RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((K, N)).astype(np.float32)


def matmul(**stored: np.ndarray) -> onnx.ModelProto:
    """`y = x w`, where w may be dequantized from a stored `q`."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    x, y = (helper.make_tensor_value_info(name, 1, ["n", size]) for name, size in (("x", K), ("y", N)))
    tensors = [ir.to_proto(ir.Tensor(array, name=name)) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def by_onnxruntime(bits: int, is_symmetric: bool, block: int = 32) -> onnx.ModelProto:
    quantizer = MatMulNBitsQuantizer(matmul(w=WEIGHT), bits=bits, block_size=block, is_symmetric=is_symmetric)
    quantizer.process()
    model: onnx.ModelProto = quantizer.model.model
    return model


def by_bitsandbytes(quant_type: int) -> onnx.ModelProto:
    quantizer = MatMulBnb4Quantizer(matmul(w=WEIGHT), quant_type, 32)
    quantizer.process()
    model: onnx.ModelProto = quantizer.model.model
    return model


def dequantized(codes: np.ndarray, scales: np.ndarray, points: np.ndarray | None, **attributes: int) -> onnx.ModelProto:
    stored = {"q": codes, "s": scales} | ({} if points is None else {"z": points})
    model = matmul(**stored)
    model.graph.node.insert(0, helper.make_node("DequantizeLinear", list(stored), ["w"], **attributes))
    return model


SCALES: dict[str, np.ndarray] = {
    "tensor": np.array(0.05, np.float32),
    "axis": np.full(N, 0.05, np.float32),
    "blocks": np.full((3, N), 0.4, np.float32),
}
POINTS = np.full((3, N), 7, ml_dtypes.uint4)
CODES = RANDOM.integers(-8, 8, (K, N))
FORMATS: dict[str, Any] = {
    **{f"{b} bits, symmetric {one}": lambda b=b, one=one: by_onnxruntime(b, one) for b in (4, 8) for one in (0, 1)},
    "blocks that are not full": lambda: by_onnxruntime(4, False, 64),
    "nf4": lambda: by_bitsandbytes(1),
    "fp4": lambda: by_bitsandbytes(0),
    "int8 per tensor": lambda: dequantized((CODES * 9).astype(np.int8), SCALES["tensor"], None),
    "int8 per axis": lambda: dequantized((CODES * 9).astype(np.int8), SCALES["axis"], np.ones(N, np.int8), axis=1),
    "int4 in blocks": lambda: dequantized(
        CODES.astype(ml_dtypes.int4), SCALES["blocks"], None, axis=0, block_size=32
    ),
    "uint4 in blocks": lambda: dequantized(
        (CODES + 8).astype(ml_dtypes.uint4), SCALES["blocks"], POINTS, axis=0, block_size=32
    ),
}  # fmt: skip


def computed(model: ir.Model) -> np.ndarray:
    """The matrix that onnxruntime multiplies by."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"x": np.eye(K, dtype=np.float32)})[0]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_read_and_written_as_onnxruntime_computes_with_them(name: str) -> None:
    model = ir.from_proto(FORMATS[name]())
    graph = model.graph
    codes = next(
        key for key, value in graph.initializers.items()
        if value.uses() and value.uses()[0].idx == (value.uses()[0].node.op_type != "DequantizeLinear")
    )  # fmt: skip
    stored = find_stored_weight(graph, codes)
    assert stored is not None
    is_turned = stored.shape == (N, K)
    matrix = stored.matrix()
    np.testing.assert_allclose(matrix.T if is_turned else matrix, computed(model), atol=1e-5)

    same, report = stored.requantized(matrix)
    for key, array in same.items():
        np.testing.assert_array_equal(array, graph.initializers[key].const_value.numpy())
    assert (report.largest_error, report.changed) == (0.0, 0.0)

    target = matrix + RANDOM.standard_normal(matrix.shape).astype(np.float32) * 0.3
    before = [graph.initializers[key].const_value for key in stored.replaced]
    changed, report = stored.requantized(target)
    assert tuple(changed) == stored.replaced
    for key, tensor in zip(stored.replaced, before, strict=True):
        assert tensor is not None
        assert (changed[key].dtype, changed[key].shape) == (tensor.numpy().dtype, tuple(tensor.shape.numpy()))
        graph.initializers[key].const_value = ir.Tensor(changed[key], name=key)
    found = computed(model)
    errors = np.abs((found.T if is_turned else found) - target)
    assert report.largest_error == pytest.approx(errors.max(), abs=1e-5)
    assert report.mean_error == pytest.approx(errors.mean(), abs=1e-5)
    assert 0 < report.changed <= 1
    if name == "int8 per tensor":
        assert report.mean_steps == pytest.approx(
            errors.mean() / float(graph.initializers[stored.replaced[1]].const_value.numpy())
        )
    steps = 16 if "int8" not in name and "8 bits" not in name else 256
    assert errors.max() <= 2.5 * np.abs(target).max() / steps * (2 if "4" in name else 1)


def test_scales_that_others_read_stay() -> None:
    model = dequantized((CODES * 9).astype(np.int8), SCALES["axis"], None, axis=1)
    model.graph.node.append(helper.make_node("Identity", ["s"], ["t"]))
    stored = find_stored_weight(ir.from_proto(model).graph, "q")
    assert stored is not None
    assert stored.replaced == ("q",)


def test_weights_whose_scales_are_computed_are_none() -> None:
    model = dequantized((CODES * 9).astype(np.int8), SCALES["axis"], None, axis=1)
    model.graph.node.insert(0, helper.make_node("Abs", ["r"], ["s"]))
    del model.graph.initializer[1]
    model.graph.initializer.append(numpy_helper.from_array(SCALES["axis"], "r"))
    assert find_stored_weight(ir.from_proto(model).graph, "q") is None
