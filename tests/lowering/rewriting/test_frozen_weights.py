"""Programs compute frozen weights where products read them, whatever is between; all else stays as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import numpy_helper
from torch import fx

from onward.graph.training_graph import make_training_graph
from onward.lowering.kernels import rematerialize
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program
from onward.lowering.rewriting.frozen_weights import (
    multiply_by_adapted_weight,
    multiply_by_frozen_weight,
    with_frozen_weights,
)
from onward.parameters import Adapter

RANDOM = np.random.default_rng(0)


def lower(body: str, **stored: np.ndarray) -> OnnxModule:
    signature = "(float[n, 128] x) => (float[n, m] y)"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {signature} {{ {body} }}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in stored.items())
    return OnnxModule(make_training_graph(model, weights_to_train=["gain"]))


def rewritten(net: OnnxModule) -> Program:
    return with_frozen_weights(net.program, net.frozen.weights, {*net.graph.weights, *net.graph.states})


def calls(code: fx.GraphModule) -> list[str]:
    return [node.target.__name__ for node in code.graph.nodes if node.op == "call_function"]


GAIN = np.ones(128, np.float32)
WEIGHT = RANDOM.standard_normal((128, 64)).astype(np.float32)
CODES = RANDOM.integers(-128, 128, (128, 64)).astype(np.int8)
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dequantized": ("d = DequantizeLinear<axis = 1>(w, s) y = MatMul(h, d)", {"w": CODES, "s": GAIN[:64]}),
    "cast": ("c = Cast<to = 1>(w) y = MatMul(h, c)", {"w": WEIGHT.astype(np.float16)}),
    "cast and transposed": (
        "c = Cast<to = 1>(w) t = Transpose(c) y = MatMul(h, t)",
        {"w": WEIGHT.T.astype(np.float16)},
    ),
    "of Gemm": ("d = DequantizeLinear<axis = 1>(w, s) y = Gemm(h, d, s)", {"w": CODES, "s": GAIN[:64]}),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_product_computes_its_weight(name: str) -> None:
    body, stored = BODIES[name]
    net = lower("h = Mul(x, gain) " + body, gain=GAIN, **stored)
    program, x = rewritten(net), torch.randn(3, 128)
    assert calls(program.code) == ["mul", multiply_by_frozen_weight.__name__]
    gain = net.weights["gain"]
    plain = net(x)
    (found,) = program(False, torch.device("cpu"), (x,), net.tensors_by_name())
    assert torch.equal(plain, found)
    gradients = [torch.autograd.grad(one.square().sum(), gain)[0] for one in (plain, found)]
    assert torch.equal(*gradients)


def test_what_products_do_not_read_is_computed_once() -> None:
    body = "h = Mul(x, gain) d = DequantizeLinear<axis = 1>(w, s) p = MatMul(h, d) e = ReduceSum(d) y = Add(p, e)"
    net = lower(body, gain=GAIN, w=CODES, s=GAIN[:64])
    program, x = rewritten(net), torch.randn(3, 128)
    names = calls(program.code)
    assert names.count(multiply_by_frozen_weight.__name__) == 1
    assert names.count("dequantize_linear") == 1  # for the sum
    assert torch.equal(program(False, torch.device("cpu"), (x,), net.tensors_by_name())[0], net(x))


def test_a_program_without_frozen_weights_is_the_same_object() -> None:
    net = lower("y = Mul(x, gain)", gain=GAIN)
    assert rewritten(net) is net.program


def test_sums_with_adapters_are_computed_again_where_no_branch_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fused Attention: one layer would keep a sum as large as its weight until its backward pass."""
    monkeypatch.setattr(rematerialize, "LEAST_BYTES", 0)
    body = "y = com.microsoft.Attention<num_heads = 2>(x, w, b)"
    signature = "(float[n, 5, 128] x) => (float[n, 5, 128] y)"
    opsets = '["" : 21, "com.microsoft" : 1]'
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: {opsets}> g {signature} {{ {body} }}")
    weight = RANDOM.standard_normal((128, 384)).astype(np.float32)
    for name, array in (("w", weight), ("b", weight[0])):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    net = OnnxModule(make_training_graph(model, adapter=Adapter(rank=2, targets=("w",))))
    tensors, x = net.tensors_by_name(), torch.randn(3, 5, 128, requires_grad=True)
    torch.nn.init.normal_(net.weights["w.lora_B"])
    program = rewritten(net)
    assert multiply_by_adapted_weight.__name__ in calls(program.code)
    gradients, kept = [], []
    for one in (net.program, program):
        large: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=large: (sizes.append(t.untyped_storage().nbytes()), t)[1], lambda t: t
        ):
            (result,) = one(True, torch.device("cpu"), (x,), tensors)
        kept.append(any(size >= weight.nbytes for size in large))
        gradients.append(torch.autograd.grad(result.square().sum(), [x, *net.weights.values()]))
    assert all(map(torch.equal, *gradients))
    assert kept == [True, False]
