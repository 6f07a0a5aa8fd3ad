"""Computing in 16 bits: what is cast, what stays finite, and what arrives in fp32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.engine.network.forward import Forward
from onward.engine.network.network import unsplit_network
from onward.engine.network.precision import Precision
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.parameters import MixedPrecision

FLOAT = TensorProto.FLOAT
HALVES = [torch.float16, torch.bfloat16]


def test_what_a_run_asks_for() -> None:
    assert Precision.of(MixedPrecision()).dtype is None
    assert Precision.of(MixedPrecision(use_mixed_precision=True, use_bfloat16=True)).dtype is torch.bfloat16
    assert Precision.of(MixedPrecision(use_mixed_precision=True, use_bfloat16=False)).dtype is torch.float16


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_cast(dtype: torch.dtype) -> None:
    """Float tensors; neither integers nor what is in 16 bits already; gradients arrive in fp32."""
    precision = Precision(dtype)
    weight = torch.nn.Parameter(torch.randn(3))
    tensors = {"w": weight, "c": torch.ones(3), "i": torch.arange(3), "h": torch.ones(3).half()}
    copies = {name: precision.lower(tensor) for name, tensor in tensors.items()}
    assert {name: copy.dtype for name, copy in copies.items()} == {
        "w": dtype, "c": dtype, "i": torch.int64, "h": torch.float16,
    }  # fmt: skip
    copies["w"].float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32


def test_full_precision_changes_nothing() -> None:
    tensor = torch.randn(3, dtype=torch.float64)
    assert Precision(None).lower(tensor) is tensor


@pytest.mark.parametrize("dtype", HALVES)
def test_masks_stay_finite_and_infinities_infinite(dtype: torch.dtype) -> None:
    numbers = torch.tensor([torch.finfo(torch.float32).min, -1e5, 0.5, 3e38, float("inf"), float("-inf"), float("nan")])
    lowered = Precision(dtype).lower(numbers)
    assert lowered.isfinite().tolist() == [True, True, True, True, False, False, False]
    assert lowered[4:6].tolist() == [float("inf"), float("-inf")]
    assert lowered[6].isnan()
    assert lowered[0] == torch.finfo(dtype).min


def masked_softmax() -> onnx.ModelProto:
    """softmax(x + mask) @ w, the mask a stored table of the lowest fp32 number; its last row is hidden whole."""
    mask = np.triu(np.full((9, 9), np.finfo(np.float32).min), 1)
    mask[-1] = np.finfo(np.float32).min
    nodes = [
        helper.make_node("Add", ["x", "mask"], ["a"]),
        helper.make_node("Softmax", ["a"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "w"], ["y"]),
    ]
    weight = np.random.default_rng(0).standard_normal((9, 5)).astype(np.float32)
    graph = helper.make_graph(
        nodes,
        "masked",
        [helper.make_tensor_value_info("x", FLOAT, ["b", 9, 9])],
        [helper.make_tensor_value_info("y", FLOAT, ["b", 9, 5])],
        [numpy_helper.from_array(mask.astype(np.float32), "mask"), numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_row_hidden_by_the_mask_is_no_nan(dtype: torch.dtype) -> None:
    """In fp32 it is uniform; so it is in 16 bits, to 2 units of the 8 bits of bfloat16."""
    net = OnnxModule(make_training_graph(masked_softmax(), weights_not_to_train=["mask"]))
    x = torch.randn(2, 9, 9, generator=torch.Generator().manual_seed(0))
    result = Forward(unsplit_network(net), ("y",), Precision(dtype))({"x": x})["y"]
    assert result.dtype is dtype
    torch.testing.assert_close(result.float(), net(x), rtol=0.02, atol=0.02)
    result.float().sum().backward()
    gradient = net.weights["w"].grad
    assert gradient is not None
    assert gradient.dtype is torch.float32
    assert gradient.isfinite().all()


LOSSES = {
    "softmax_cross_entropy": {},
    "dense": {"type": "softmax_cross_entropy", "dense_labels": True},
    "weighted": {"type": "softmax_cross_entropy", "class_weights": [1.0, 1.001, 1.002, 1.003, 1.004]},
    "mean_squared_error": {},
    "l1": {},
    "binary_cross_entropy": {"from_logits": True},
}


def linear(opset: int) -> onnx.ModelProto:
    weight = (np.random.default_rng(0).integers(-8, 9, (4, 5)) / 8).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", FLOAT, ["b", 4])],
        [helper.make_tensor_value_info("y", FLOAT, ["b", 5])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("opset", [9, 18])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_computed_in_fp32(name: str, opset: int, dtype: torch.dtype) -> None:
    """With logits that both types hold exactly, the loss equals that of full precision to 1e-6, labels included."""
    spec = LossSpec(**{"type": name, "prediction": "y", "label": "labels", **LOSSES[name]})  # type: ignore[arg-type]
    net = OnnxModule(make_training_graph(linear(opset), loss=spec))
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (1000, 4), generator=generator).float()
    if name in ("softmax_cross_entropy", "weighted"):
        labels = torch.randint(0, 5, (1000,), generator=generator)
    else:
        labels = torch.rand(1000, 5, generator=generator)
    features = {"x": x, "labels": labels}
    expected = Forward(unsplit_network(net), ("loss",), Precision(None))(features)["loss"]
    low = Forward(unsplit_network(net), ("loss", "y"), Precision(dtype))(features)
    assert low["y"].dtype is dtype
    assert low["loss"].dtype is torch.float32
    torch.testing.assert_close(low["loss"], expected, rtol=1e-6, atol=0)
    low["loss"].backward()
    gradient = net.weights["w"].grad
    assert gradient is not None
    assert gradient.dtype is torch.float32


def test_bf16_on_a_cpu_equals_torch_autocast() -> None:
    """The same two layers written in torch, under torch's own autocast: output, loss and gradients, bit by bit."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (48, 64), "b1": (64,), "w2": (64, 10), "b2": (10,)}
    stored = {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", FLOAT, ["b", 48])],
        [helper.make_tensor_value_info("y", FLOAT, ["b", 10])],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = torch.from_numpy(rng.standard_normal((32, 48)).astype(np.float32))
    net = OnnxModule(make_training_graph(model))
    found = Forward(unsplit_network(net), ("y",), Precision(torch.bfloat16))({"x": x})["y"]
    found.float().square().mean().backward()
    own = {name: torch.from_numpy(array).requires_grad_() for name, array in stored.items()}
    with torch.autocast("cpu", torch.bfloat16):
        hidden = torch.nn.functional.linear(x, own["w1"].t(), own["b1"]).relu()
        expected = torch.nn.functional.linear(hidden, own["w2"].t(), own["b2"])
    expected.float().square().mean().backward()
    assert found.dtype is expected.dtype is torch.bfloat16
    assert torch.equal(found, expected)
    for name, weight in own.items():
        gradient = net.weights[name].grad
        assert gradient is not None
        assert gradient.dtype is torch.float32
        torch.testing.assert_close(gradient, weight.grad, rtol=2**-8, atol=2**-8 * float(weight.grad.abs().max()))
