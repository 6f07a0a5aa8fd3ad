"""A model with and without fusion: what both compute, and the gradients of it, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import torch
from torch import Tensor

from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.lowering.building.specialization import specialize
from onward.lowering.module import OnnxModule
from onward.lowering.ops.fused_attention import attention
from onward.lowering.program import Program

EXACT = 1e-10
"""Relative bound of float64 results against each other."""
TINY = {"layers": 2, "heads": 2, "width": 8, "vocab_size": 300, "context_length": 16, "dropout": 0.0}


def parse(
    inputs: str, outputs: str, body: str, stored: Mapping[str, Any] | None = None, opset: int = 18
) -> onnx.ModelProto:
    """A model in ONNX's text form; `stored` become initializers, numpy arrays as they are, numbers as float64."""
    opsets = f'"" : {opset}, "com.microsoft" : 1'
    text = f"<ir_version: 9, opset_import: [{opsets}]>\nmodel ({inputs}) => ({outputs}) {{\n{body}\n}}"
    model = onnx.parser.parse_model(text)
    for name, value in (stored or {}).items():
        array = value if isinstance(value, np.ndarray) else np.asarray(value, np.float64)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def kinds(graph: TrainingGraph) -> dict[str, int]:
    """How often each fusion happened."""
    return dict(Counter(fusion.kind for fusion in graph.fusions))


def both(model: Any, **options: Any) -> tuple[OnnxModule, OnnxModule]:
    """The model lowered as it is, and fused."""
    plain = OnnxModule(make_training_graph(model, **options))
    return plain, OnnxModule(make_training_graph(model, fuse=True, **options))


def run(
    call: Callable[..., Any], net: OnnxModule, inputs: Mapping[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and the gradients of a random projection of them by every float input and weight."""
    leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    net.zero_grad()
    outputs = call(**leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(3)
    total = sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum() for x in outputs)
    assert isinstance(total, Tensor)
    total.backward()
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    gradients |= {name: weight.grad for name, weight in net.weights.items() if weight.grad is not None}
    return [x.detach() for x in outputs], gradients


def specialized(net: OnnxModule, inputs: Mapping[str, Tensor]) -> Program:
    """The program for inputs of these shapes, as a run uses it."""
    tensors = net.tensors_by_name()
    constants = frozenset(tensors) - {*net.graph.weights, *net.graph.states}
    given = [inputs[name] for name in net.program.inputs]
    return specialize(net.program, net.device, given, tensors, constants)


def attention_calls(program: Program) -> list[dict[str, Any]]:
    """Mask and causality of every call of fused attention."""
    return [
        {"masked": len(node.args) > 3 and node.args[3] is not None, "causal": bool(node.kwargs.get("is_causal", 0))}
        for node in program.code.graph.nodes
        if node.target is attention
    ]


def assert_close(left: Tensor, right: Tensor, bound: float = EXACT) -> None:
    """Equal to a relative bound, NaN where the other is NaN."""
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    torch.testing.assert_close(
        left, right, rtol=bound, atol=bound * max(1.0, left.nan_to_num().abs().max().item()), equal_nan=True
    )


def assert_fused(
    model: onnx.ModelProto,
    inputs: Mapping[str, Tensor],
    expected: Mapping[str, int],
    trained: Collection[str] = (),
    gradients: bool = True,
) -> tuple[OnnxModule, OnnxModule]:
    """Fusion happens as often as expected, and changes neither outputs nor gradients, also for known shapes.

    Of the stored tensors those in `trained` are weights, the others constants.
    """
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
    stored = [tensor.name for tensor in model.graph.initializer if tensor.data_type in floats]
    constants = [name for name in stored if name not in trained]
    plain, fused = both(model, weights_not_to_train=constants)
    assert set(trained) <= set(fused.weights)
    assert kinds(fused.graph) == dict(expected)
    wanted, wanted_gradients = run(plain, plain, inputs)
    program = specialized(fused, inputs)

    def call(**given: Tensor) -> Any:
        return program(fused.training, fused.device, [given[n] for n in program.inputs], fused.tensors_by_name())

    for way in (fused, call):
        found, found_gradients = run(way, fused, inputs)
        for left, right in zip(wanted, found, strict=True):
            assert_close(left, right)
        if gradients:
            assert found_gradients.keys() == wanted_gradients.keys()
            for name, gradient in wanted_gradients.items():
                assert_close(gradient, found_gradients[name])
    return plain, fused
