"""Products in FP8: against the same formula in float64, its rounding done by ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.utils._python_dispatch import TorchDispatchMode

from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.lowering.rewriting.float8 import float8_product, quantize, why_not, with_float8_products

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
K, N = 32, 48
SCALES = 2.0, 0.05, 0.1
"""Of activations, weights and gradients."""

EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of one rounding of a result."""


def rounded(array: np.ndarray, kind: Any) -> np.ndarray:
    """Numbers as FP8 has them under one scale for all, in float64."""
    largest = np.float32(ml_dtypes.finfo(kind).max)
    scale = np.float32(np.abs(array).max()) / largest
    small = np.clip(array.astype(np.float32) / scale, -largest, largest).astype(kind)
    return small.astype(np.float64) * np.float64(scale)


def tensors(dtype: torch.dtype, *rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """X, W and the gradient of the result; their numbers span several powers of two."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((*rows, K), (K, N), (*rows, N))
    drawn = [torch.randn(shape, generator=generator) ** 3 * scale for shape, scale in zip(shapes, SCALES, strict=True)]
    x, w, g = (tensor.to(dtype) for tensor in drawn)
    return x.requires_grad_(), w.requires_grad_(), g


def close(actual: torch.Tensor, left: np.ndarray, right: np.ndarray, dtype: torch.dtype) -> None:
    """Within one rounding of each result, and those of adding up some 50 products in fp32."""
    bound = EPSILON[dtype] * np.abs(left @ right) + 1e-6 * (np.abs(left) @ np.abs(right)) + 2.0**-25
    assert (np.abs(actual.detach().double().numpy().reshape(bound.shape) - left @ right) <= bound).all()


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("rows", [(32,), (2, 3, 5), (1,)], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_values_and_gradients(dtype: torch.dtype, rows: tuple[int, ...], is_transposed: bool) -> None:
    x, w, g = tensors(dtype, *rows)
    stored = w.detach().t().contiguous().requires_grad_() if is_transposed else w
    y = float8_product(x, stored, is_transposed=is_transposed)
    y.backward(g)
    assert (y.shape, y.dtype) == ((*rows, N), dtype)
    assert x.grad is not None
    assert stored.grad is not None
    assert (x.grad.dtype, stored.grad.dtype) == (dtype, dtype)
    flat = [tensor.detach().float().numpy() for tensor in (x.reshape(-1, K), w, g.reshape(-1, N))]
    left, right, gradient = rounded(flat[0], E4M3), rounded(flat[1], E4M3), rounded(flat[2], E5M2)
    close(y, left, right, dtype)
    close(x.grad, gradient, right.T, dtype)
    close(stored.grad.t() if is_transposed else stored.grad, left.T, gradient, dtype)


def test_it_is_8_bits_that_are_multiplied() -> None:
    """Three products of torch's own kind, and what comes out differs from fp32 by the rounding of 3 bits."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    x, w, g = tensors(torch.float32, 16)
    with Watch():
        y = float8_product(x, w)
        y.backward(g)
    assert seen.count("aten::_scaled_mm") == 3
    assert not {"aten::mm", "aten::addmm", "aten::matmul", "aten::bmm"} & set(seen)
    error = ((y - x @ w).norm() / (x @ w).norm()).item()
    assert 0.005 < error < 0.1


def test_the_bias_is_added_as_it_is() -> None:
    x, w, _ = tensors(torch.float32, 16)
    bias = torch.randn(N, requires_grad=True)
    y = float8_product(x, w, bias)
    torch.testing.assert_close(y, float8_product(x, w) + bias, rtol=0, atol=0)
    y.sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [16.0] * N


def test_under_autocast_results_are_in_its_type() -> None:
    x, w, _ = tensors(torch.float32, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = float8_product(x, w)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), float8_product(x, w), rtol=2**-8, atol=1e-5)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


@pytest.mark.parametrize(("with_x", "with_w"), [(True, False), (False, True), (False, False)])
def test_either_operand_may_have_no_gradient(with_x: bool, with_w: bool) -> None:
    x, w, g = tensors(torch.float32, 16)
    expected = torch.autograd.grad(float8_product(x, w), (x, w), g)
    given = x.detach().requires_grad_(with_x), w.detach().requires_grad_(with_w)
    result = float8_product(*given)
    assert result.requires_grad == (with_x or with_w)
    for leaf, one in zip(given, expected, strict=True):
        if leaf.requires_grad:
            assert torch.equal(torch.autograd.grad(result, leaf, g, retain_graph=True)[0], one)


def test_second_derivatives_are_refused() -> None:
    """Both operands are kept in 8 bits, through which none would flow."""
    x, w, g = tensors(torch.float32, 16)
    with pytest.raises(RuntimeError, match="of Product has no second derivative"):
        torch.autograd.grad(float8_product(x, w), (x, w), g, create_graph=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's compiler itself
def test_torchs_compiler_takes_it_without_a_break() -> None:
    """What torch makes of it before it writes code: one graph each for forward and backward pass."""

    def network(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return float8_product(torch.relu(x), w) * 2.0

    x, w, g = tensors(torch.float32, 2, 5)
    y = network(x, w)
    plain = [y, *torch.autograd.grad(y, (x, w), g)]
    y = torch.compile(network, fullgraph=True, backend="aot_eager")(x, w)
    for one, other in zip([y, *torch.autograd.grad(y, (x, w), g)], plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_nothing_and_what_is_not_finite() -> None:
    zero, scale = quantize(torch.zeros(4, 4), torch.float8_e4m3fn)
    assert (zero.float() * scale).abs().max() == 0
    largest, scale = quantize(torch.tensor([-3e38, 1.0, 3e38]), torch.float8_e4m3fn)
    torch.testing.assert_close(largest.float() * scale, torch.tensor([-3e38, 0.0, 3e38]))
    tiny, scale = quantize(torch.tensor([1e-40, -1e-40]), torch.float8_e5m2)
    assert (tiny.float() * scale).isfinite().all()
    x, w, _ = tensors(torch.float32, 16)
    for number in (float("inf"), float("nan")):
        broken = x.detach().clone()
        broken[3, 3] = number
        assert not float8_product(broken, w).isfinite().any(), "an update that is not finite is skipped"


def test_a_device_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    assert why_not(cuda) == (
        "NVIDIA A100 (compute capability 8.0) has no FP8 matmuls; they need an Ada, Hopper or newer GPU "
        "(8.9 or higher)."
    )
    assert why_not(torch.device("cpu")) is None

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no kernel\nand a stack")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    assert why_not(torch.device("cpu")) == f"torch {torch.__version__} has no FP8 matmuls here (no kernel)."


# ---------------------------------------------------------------------------------------------------------- programs


def program_of(*nodes: Any, **weights: tuple[int, ...]) -> OnnxModule:
    """A network of these nodes from `x` [rows, 32] to `y`."""
    generator = np.random.default_rng(0)
    arrays = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output], **attributes) for op, inputs, output, attributes in nodes],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return OnnxModule(make_training_graph(model))


PRODUCTS = {
    "MatMul": (("MatMul", ["x", "w"], "y", {}), (K, N)),
    "Gemm": (("Gemm", ["x", "w", "b"], "y", {}), (K, N)),
    "Gemm transposed": (("Gemm", ["x", "w", "b"], "y", {"transB": 1}), (N, K)),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_with_weights_become_ones_in_8_bits(kind: str) -> None:
    node, shape = PRODUCTS[kind]
    net = program_of(node, w=shape, **({"b": (N,)} if "b" in node[1] else {}))
    found = with_float8_products(net.program, net.tensors_by_name())
    assert (found.weights, found.others) == (("w",), {})
    x = torch.randn(5, K)
    given = net.tensors_by_name()
    (y,) = found.program(False, torch.device("cpu"), (x,), given)
    bias = given.get("b")
    torch.testing.assert_close(y, float8_product(x, given["w"], bias, is_transposed="transposed" in kind))
    assert not torch.equal(y, net(x)), "the program that was given is as it was"
    torch.testing.assert_close(y, net(x), rtol=0.1, atol=1.0)


def test_a_weight_that_is_transposed_by_a_node() -> None:
    net = program_of(("Transpose", ["w"], "t", {"perm": [1, 0]}), ("MatMul", ["x", "t"], "y", {}), w=(N, K))
    assert with_float8_products(net.program, net.tensors_by_name()).weights == ("w",)


@pytest.mark.parametrize(
    ("nodes", "weights", "reason"),
    [
        ([("MatMul", ["x", "w"], "y", {})], {"w": (K, 40)}, "40 of 32x40 does not divide by 16"),
        ([("MatMul", ["x", "w"], "y", {})], {"w": (2, K, N)}, "it has 3 axes, a matrix has 2"),
        (
            [("Gemm", ["x", "w"], "y", {"alpha": 0.5})],
            {"w": (K, N)},
            "its Gemm scales or transposes what is no weight",
        ),
    ],
)
def test_what_stays_as_it_is_and_why(nodes: list[Any], weights: dict[str, tuple[int, ...]], reason: str) -> None:
    net = program_of(*nodes, **weights)
    found = with_float8_products(net.program, net.tensors_by_name())
    assert (found.weights, found.others) == ((), {"w": reason})
    x = torch.randn(5, K)
    torch.testing.assert_close(found.program(False, torch.device("cpu"), (x,), net.tensors_by_name())[0], net(x))


def test_products_of_activations_are_nobodys_business() -> None:
    net = program_of(("MatMul", ["x", "w"], "h", {}), ("MatMul", ["h", "h"], "y", {}), w=(K, K))
    found = with_float8_products(net.program, net.tensors_by_name())
    assert (found.weights, found.others) == (("w",), {})
