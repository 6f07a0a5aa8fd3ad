"""Runs a reference model with onnxruntime, and compares gradients of onward with those of a torch module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

OPSETS = (13, 16, 17, 18, 20, 21, 23)
"""First, last, and both sides of every version at which a graph is written differently."""


def initial_weights(model: ir.Model) -> dict[str, torch.Tensor]:
    """Every float initializer of rank 1 and above, by name."""
    found = {}
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        if value.dtype == ir.DataType.FLOAT and value.const_value.shape.rank():
            found[name] = torch.from_numpy(np.array(value.const_value.numpy()))
    return found


def run_onnxruntime(model: ir.Model, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """All outputs of a model, on the CPU, without graph optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    feeds = {node.name: tensor.numpy() for node, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, feeds)]


def largest_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest absolute difference, relative to the largest absolute value expected of the same tensor."""
    worst = 0.0
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape, (one.shape, other.shape)
        assert one.isfinite().all()
        worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp(min=1e-6)))
    return worst


def shake(weights: Mapping[str, torch.Tensor], seed: int = 1) -> dict[str, torch.Tensor]:
    """The weights, each moved a little, so that zeros and ones do not hide a weight in the wrong place."""
    generator = torch.Generator().manual_seed(seed)
    shaken = {}
    for name, weight in weights.items():
        noise = 0.1 * torch.randn(weight.shape, generator=generator)
        shaken[name] = weight * (1 + noise) if name.endswith("running_var") else weight + noise
    return shaken


def replace_weights(model: ir.Model, weights: Mapping[str, torch.Tensor]) -> None:
    """Puts other values into a model's initializers."""
    for name, weight in weights.items():
        model.graph.initializers[name].const_value = ir.Tensor(weight.numpy(), name=name)


def symbols(model: ir.Model) -> set[str]:
    """The names of all symbolic dimensions of values; "unknown" where a value has no shape."""
    shapes = [value.shape for node in model.graph for value in node.outputs]
    named = {str(axis) for shape in shapes if shape is not None for axis in shape if not isinstance(axis, int)}
    return named | ({"unknown"} if None in shapes else set())
