"""Batch normalizations folded into the layers before them: the same numbers, and those that stay."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.graph.quantize_aware.batch_norm_folding import fold_batch_norms, stored_value

DRAW = np.random.default_rng(0)


def model_of(body: str, weight: tuple[int, ...], x: str = "n, 3", **more: np.ndarray) -> ir.Model:
    text = f'<ir_version: 8, opset_import: ["": 18]> g (float[{x}] x) => (y) {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    tensors = {"w": DRAW.normal(size=weight), **{name: DRAW.uniform(0.5, 2, 4) for name in ("s", "h", "m", "v", "b")}}
    for name, array in {**tensors, **more}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array).astype(np.float32), name))
    return ir.from_proto(proto)


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    return np.asarray(onnx.reference.ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})[0])


NORM = "y = BatchNormalization<epsilon = 0.01>(a, s, h, m, v)"


@pytest.mark.parametrize(
    ("layer", "weight", "shape"),
    [
        ("a = Gemm(x, w)", (3, 4), (5, 3)),
        ("a = Gemm<transB = 1>(x, w, b)", (4, 3), (5, 3)),
        ("a = Conv(x, w, b)", (4, 3, 2, 2), (2, 3, 5, 5)),
        ("a = Conv(x, w)", (4, 3, 2, 2), (2, 3, 5, 5)),
    ],
)
def test_the_same_is_computed(layer: str, weight: tuple[int, ...], shape: tuple[int, ...]) -> None:
    model = model_of(f"{layer} {NORM}", weight, ", ".join(["n", *map(str, shape[1:])]))
    x = DRAW.normal(size=shape).astype(np.float32)
    before = run(model, x)
    (note,) = fold_batch_norms(model)
    assert note == (
        "quantize_aware: 1 batch normalizations were folded into the layers before them, with their running "
        "statistics, for integer kernels."
    )
    assert [node.op_type for node in model.graph] == [layer.split()[2].partition("(")[0].partition("<")[0]]
    np.testing.assert_allclose(run(model, x), before, rtol=1e-4, atol=1e-5)
    assert not {"s", "h", "m", "v"} & set(model.graph.initializers)


@pytest.mark.parametrize(
    "body",
    [
        f"r = Gemm(x, w) a = Relu(r) {NORM}",
        f"a = Gemm(x, w) {NORM} z = Relu(a)",
        f"a = Gemm(x, w) {NORM} z = Transpose(w)",
        f"a = Gemm<beta = 0.5>(x, w, b) {NORM}",
        f"a = MatMul(x, w) {NORM}",
    ],
)
def test_what_stays(body: str) -> None:
    model = model_of(body, (3, 4))
    count = len(list(model.graph))
    assert fold_batch_norms(model) == ()
    assert len(list(model.graph)) == count


def test_statistics_of_a_model_that_was_never_trained_are_reported() -> None:
    fresh = {"m": np.zeros(4), "v": np.ones(4)}
    (note,) = fold_batch_norms(model_of(f"a = Gemm(x, w) {NORM}", (3, 4), **fresh))
    assert note.endswith(
        "1 of them have the statistics of a model that was never trained: train the float model first."
    )


def test_values_that_are_stored_and_copies_of_them() -> None:
    model = model_of("i = Identity(w) y = Gemm(x, i)", (3, 4))
    assert stored_value(model.graph[0].outputs[0]) is model.graph.initializers["w"]
    assert stored_value(model.graph.inputs[0]) is None
    assert stored_value(model.graph.outputs[0]) is None
    assert stored_value(None) is None
