"""Matrices, tables and experts of few bits in blocks equal onnxruntime's CPU kernels; their scales have gradients."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from onward.errors import NodeError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run, run_onnxruntime, to_array

RANDOM = np.random.default_rng(0)
MICROSOFT = "com.microsoft"


@pytest.mark.parametrize(("bits", "points"), [(4, "none"), (4, "packed"), (4, "float"), (8, "none"), (8, "packed")])
@pytest.mark.parametrize("K", [32, 40])
def test_matrix_of_few_bits(bits: int, points: str, K: int) -> None:
    N, block = 5, 16
    blocks = -(-K // block)
    inputs: dict[str, Any] = {
        "A": RANDOM.standard_normal((2, 3, K)).astype(np.float32),
        "B": RANDOM.integers(0, 256, (N, blocks, block * bits // 8)).astype(np.uint8),
        "scales": RANDOM.random((N, blocks)).astype(np.float32),
    }
    if points == "packed":
        inputs["zero_points"] = RANDOM.integers(0, 256, (N, -(-blocks * bits // 8))).astype(np.uint8)
    elif points == "float":
        inputs["zero_points"] = RANDOM.random((N, blocks)).astype(np.float32) * 8
    stored = {name: value for name, value in inputs.items() if name != "A"}
    attributes = {"K": K, "N": N, "bits": bits, "block_size": block}
    model = make_model("MatMulNBits", inputs, attributes, 20, 1, stored, domain=MICROSOFT)
    check_against_onnxruntime(model, inputs["A"], rtol=1e-3, atol=1e-3)


def test_matrix_of_few_bits_with_groups_and_a_bias() -> None:
    K, N, block = 32, 6, 16
    stored: dict[str, Any] = {
        "B": RANDOM.integers(0, 256, (N, K // block, block // 2)).astype(np.uint8),
        "scales": RANDOM.random((N, K // block)).astype(np.float32),
        "g_idx": RANDOM.permutation(np.arange(K) // block).astype(np.int32),
        "bias": RANDOM.standard_normal(N).astype(np.float32),
    }
    A = RANDOM.standard_normal((3, K)).astype(np.float32)
    attributes = {"K": K, "N": N, "bits": 4, "block_size": block}
    own = {"A": A, "B": stored["B"], "scales": stored["scales"], "zero_points": None, **stored}
    model = make_model("MatMulNBits", own, attributes, 20, 1, stored, domain=MICROSOFT)
    check_against_onnxruntime(model, A, rtol=1e-4, atol=1e-4)
    # onnxruntime's CPU kernel leaves zero points out here, which its documentation does not say.
    points: np.ndarray[Any, Any] = RANDOM.integers(0, 16, (N, K // block))
    packed = (points[:, :1] | points[:, 1:] << 4).astype(np.uint8)
    model = make_model("MatMulNBits", {**own, "zero_points": packed}, attributes, 20, 1, domain=MICROSOFT)
    codes = np.stack([stored["B"] & 15, stored["B"] >> 4], -1).reshape(N, K).astype(np.float32)
    weight = (codes - points[:, stored["g_idx"]]) * stored["scales"][:, stored["g_idx"]]
    found = run(model, A, stored["B"], stored["scales"], packed, stored["g_idx"], stored["bias"])
    np.testing.assert_allclose(to_array(found), A @ weight.T + stored["bias"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quant_type", [0, 1], ids=["fp4", "nf4"])
@pytest.mark.parametrize(("K", "N"), [(32, 6), (48, 5)])
def test_matrix_of_4_bit_floats(quant_type: int, K: int, N: int) -> None:
    stored = {
        "B": RANDOM.integers(0, 256, -(-K * N // 2)).astype(np.uint8),
        "absmax": RANDOM.random(-(-K * N // 32)).astype(np.float32),
    }
    A = RANDOM.standard_normal((2, 3, K)).astype(np.float32)
    attributes = {"K": K, "N": N, "block_size": 32, "quant_type": quant_type}
    model = make_model("MatMulBnb4", {"A": A, **stored}, attributes, 20, 1, stored, domain=MICROSOFT)
    check_against_onnxruntime(model, A, rtol=1e-5, atol=1e-5)
    wide = make_model("MatMulBnb4", {"A": A.astype(np.float64), **stored}, attributes, 20, 1, stored, domain=MICROSOFT)
    check_gradients(wide, A.astype(np.float64))


def test_what_is_not_known_of_such_matrices_is_named() -> None:
    A, B, scales = np.zeros((1, 16), np.float32), np.zeros((2, 1, 8), np.uint8), np.ones((2, 1), np.float32)
    numbers = {"K": 16, "N": 2, "block_size": 16}
    inputs = {"A": A, "B": B, "scales": scales}
    packed = make_model("MatMulNBits", inputs, {**numbers, "weight_prepacked": 1}, 20, domain=MICROSOFT)
    with pytest.raises(NodeError, match="Export the model again without prepacking"):
        run(packed, *inputs.values())
    other = make_model("MatMulBnb4", inputs, {**numbers, "quant_type": 2}, 20, domain=MICROSOFT)
    with pytest.raises(NodeError, match=r"quant_type is 2; 0 \(FP4\) and 1 \(NF4\) are known"):
        run(other, *inputs.values())


def test_scales_of_a_matrix_of_few_bits_have_a_gradient() -> None:
    A, scales = torch.randn(3, 16, dtype=torch.float64), torch.rand(2, 1, dtype=torch.float64, requires_grad=True)
    B = torch.randint(0, 256, (2, 1, 8), dtype=torch.uint8)
    inputs = {"A": A, "B": B, "scales": scales}
    model = make_model("MatMulNBits", inputs, {"K": 16, "N": 2, "block_size": 16}, 20, domain=MICROSOFT)

    def compute(scales: torch.Tensor) -> torch.Tensor:
        return run(model, A, B, scales)

    assert torch.autograd.gradcheck(compute, [scales])


def test_unknown_bits_are_named() -> None:
    inputs = {
        "A": np.zeros((1, 16), np.float32),
        "B": np.zeros((2, 1, 6), np.uint8),
        "scales": np.ones((2, 1), np.float32),
    }
    model = make_model("MatMulNBits", inputs, {"K": 16, "N": 2, "block_size": 16, "bits": 3}, 20, domain=MICROSOFT)
    with pytest.raises(NodeError, match="bits is 3; 2, 4 and 8 are known"):
        run(model, *inputs.values())


TABLES = [
    (np.uint8, 4, {"gather_axis": 0, "quantize_axis": 1}),
    (np.uint8, 8, {"gather_axis": 0, "quantize_axis": -1}),
    (ml_dtypes.uint4, 4, {"gather_axis": 0, "quantize_axis": 1}),
    (ml_dtypes.int4, 4, {"gather_axis": 1, "quantize_axis": 0}),
    (ml_dtypes.int4, 4, {}),
]


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize(("dtype", "bits", "axes"), TABLES)
def test_rows_of_a_table_of_few_bits(dtype: Any, bits: int, axes: dict[str, int], points: bool) -> None:
    block, shape = 16, [40, 48]
    along = axes.get("quantize_axis", 1)
    blocks = [40, 48]
    blocks[along] = -(-blocks[along] // block)
    low, high = (-8, 8) if dtype == ml_dtypes.int4 else (0, 256 if dtype == np.uint8 else 16)
    packed = bits if dtype == np.uint8 else 8
    stored: dict[str, Any] = {
        "data": RANDOM.integers(low, high, (shape[0], shape[1] * packed // 8)).astype(dtype),
        "scales": RANDOM.uniform(0.5, 2, blocks).astype(np.float32),
    }
    if points:
        stored["zero_points"] = RANDOM.integers(low, high, (blocks[0], -(-blocks[1] * packed // 8))).astype(dtype)
    indices = RANDOM.integers(-40, 40, (2, 3))
    inputs = {"data": None, "indices": indices, "scales": None, "zero_points": None}
    model = make_model(
        "GatherBlockQuantized", inputs, {"block_size": block, "bits": bits, **axes}, 21, 1, stored, domain=MICROSOFT
    )
    check_against_onnxruntime(model, indices, rtol=1e-6, atol=1e-6)


def test_scales_of_a_table_of_few_bits_have_a_gradient() -> None:
    inputs = {
        "data": RANDOM.integers(0, 256, (5, 16)).astype(np.uint8),
        "indices": np.array([[1, 4], [4, -5]]),
        "scales": RANDOM.uniform(0.5, 2, (5, 2)),
        "zero_points": RANDOM.integers(0, 256, (5, 1)).astype(np.uint8),
    }
    model = make_model("GatherBlockQuantized", inputs, {"block_size": 16}, 21, domain=MICROSOFT)
    check_gradients(model, *inputs.values())


EXPERTS, HIDDEN, INNER = 3, 32, 16


def _experts(bits: int, rows: int, block: int | None, points: bool, biases: bool) -> dict[str, Any]:
    def packed(*shape: int) -> np.ndarray[Any, Any]:
        return RANDOM.integers(0, 256, (*shape[:-1], -(-shape[-1] * bits // 8))).astype(np.uint8)

    def scales(outer: int, inner: int) -> np.ndarray[Any, Any]:
        shape = (EXPERTS, outer) if block is None else (EXPERTS, outer, inner // block)
        return RANDOM.uniform(0.005, 0.02, shape).astype(np.float32)

    def zero_points(outer: int, inner: int) -> np.ndarray[Any, Any] | None:
        if not points:
            return None
        return packed(EXPERTS, outer) if block is None else packed(EXPERTS, outer, inner // block)

    def bias(size: int) -> np.ndarray[Any, Any] | None:
        return RANDOM.standard_normal((EXPERTS, size)).astype(np.float32) if biases else None

    return {
        "x": RANDOM.standard_normal((7, HIDDEN)).astype(np.float32),
        "router": RANDOM.standard_normal((7, EXPERTS)).astype(np.float32),
        "w1": packed(EXPERTS, rows, HIDDEN),
        "s1": scales(rows, HIDDEN),
        "b1": bias(rows),
        "w2": packed(EXPERTS, HIDDEN, INNER),
        "s2": scales(HIDDEN, INNER),
        "b2": bias(HIDDEN),
        "w3": None,
        "s3": None,
        "b3": None,
        "z1": zero_points(rows, HIDDEN),
        "z2": zero_points(HIDDEN, INNER),
    }


@pytest.mark.parametrize(
    ("bits", "block", "points"), [(4, None, False), (8, None, False), (4, 16, False), (8, 16, True), (4, 16, True)]
)
@pytest.mark.parametrize("attributes", [{}, {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1}])
def test_experts_of_few_bits(attributes: dict[str, Any], bits: int, block: int | None, points: bool) -> None:
    rows = 2 * INNER if "swiglu_fusion" in attributes else INNER
    inputs = _experts(bits, rows, block, points, biases=bits == 4)
    stored = {name: value for name, value in inputs.items() if name not in ("x", "router") and value is not None}
    options = {**attributes, "expert_weight_bits": bits, "normalize_routing_weights": 1}
    options |= {} if block is None else {"block_size": block}
    model = make_model("QMoE", inputs, options, 20, 1, stored, domain=MICROSOFT)
    if bits == 4 or block is None:
        check_against_onnxruntime(model, inputs["x"], inputs["router"], rtol=1e-3, atol=1e-3)
        return
    # onnxruntime computes these with activations in 8 bits.
    expected, actual = (
        run_onnxruntime(model, inputs["x"], inputs["router"])[0],
        run(model, inputs["x"], inputs["router"]),
    )
    assert np.abs(to_array(actual) - expected).max() < 0.02 * np.abs(expected).max()


def test_bits_of_each_matrix_and_experts_that_are_not_known() -> None:
    inputs = {name: value for name, value in _experts(4, INNER, None, False, True).items() if value is not None}
    fine = to_array(run(make_model("QMoE", inputs, {}, 20, domain=MICROSOFT), *inputs.values()))
    wider = {"expert_weight_bits": 8, "fc1_expert_weight_bits": 4, "fc2_expert_weight_bits": 4}
    model = make_model("QMoE", inputs, wider, 20, domain=MICROSOFT)
    np.testing.assert_array_equal(to_array(run(model, *inputs.values())), fine)
    model = make_model("QMoE", inputs, {"quant_type": "fp4"}, 20, domain=MICROSOFT)
    with pytest.raises(NodeError, match=r"QMoE with an fc3, .* or quant_type 'fp4' is not known"):
        run(model, *inputs.values())
