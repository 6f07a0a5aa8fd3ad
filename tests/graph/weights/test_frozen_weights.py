"""Frozen weights are found behind casts, transpositions and dequantization; constants of the arithmetic are none."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
from onnx import numpy_helper

from onward.graph.weights.frozen_weights import find_frozen_weights

SIZES = "float[128, 64]"


def find(body: str, stored: str, trained: tuple[str, ...] = ()) -> tuple[set[str], set[str]]:
    """Names of weights and scales of a graph that stores zeros of some types."""
    imports = '[ "" : 21, "com.microsoft" : 1 ]'
    signature = "(float[n, 128] x, int64[n] i) => (float[n, m] y)"
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: {imports}> g {signature} <{stored}> {{ {body} }}")
    for declared in model.graph.value_info:
        shape = [dimension.dim_value for dimension in declared.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(declared.type.tensor_type.elem_type)
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, dtype), declared.name))
    del model.graph.value_info[:]
    found = find_frozen_weights(ir.from_proto(model).graph, trained)
    return set(found.weights), set(found.scales)


def test_weights_behind_other_nodes() -> None:
    assert find("y = MatMul(x, w)", f"{SIZES} w") == ({"w"}, set())
    assert find("y = MatMul(x, w)", f"{SIZES} w", ("w",)) == (set(), set())
    assert find("t = Transpose(w) y = MatMul(x, t)", "float[64, 128] w") == ({"w"}, set())
    assert find("c = Cast<to = 1>(w) y = MatMul(x, c)", "float16[128, 64] w") == ({"w"}, set())
    quantized = "int8[128, 64] w, float[64] s, int8[64] z"
    assert find("d = DequantizeLinear<axis = 1>(w, s, z) y = MatMul(x, d)", quantized) == ({"w"}, {"s"})
    blocked = "uint8[64, 4, 32] b, float[64, 4] s"
    body = "y = com.microsoft.MatMulNBits<K = 128, N = 64, bits = 8, block_size = 32>(x, b, s)"
    assert find(body, blocked) == ({"b"}, {"s"})


def test_tables_that_batches_look_up_in() -> None:
    assert find("y = Gather(w, i)", f"{SIZES} w") == ({"w"}, set())
    assert find("y = Gather(w, j)", f"{SIZES} w, int64[1] j") == (set(), set())


def test_constants_of_the_arithmetic_and_small_tables_are_none() -> None:
    assert find("y = Mul(x, w)", "float[64, 128] w") == (set(), set())
    assert find("y = MatMul(x, w)", "float[128, 2] w") == (set(), set())
    assert find("c = MatMul(v, w) d = MatMul(x, c) y = Identity(d)", f"float[128, 128] v, {SIZES} w") == (
        {"v", "w"}, set(),
    )  # fmt: skip
