"""Who is right where two runtimes differ: a file in float64 by the onnx package, or node by node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import onward
from benchmarks.found_models_inputs import Array, open_session

STEPS_OF_A_RECURRENCE = 2
_FLOAT, _DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE


def in_float64(path: Path, inputs: Mapping[str, Array]) -> list[Array]:
    """Outputs of a file whose every float32 became float64.

    Raises:
        Exception: the reference evaluator lacks an operator, or an operator refuses float64.
    """
    model = onnx.load(path)
    _widen_graph(model.graph)
    for function in model.functions:
        _widen_nodes(function.node)
    feeds = {name: value.astype(np.float64) if value.dtype == np.float32 else value for name, value in inputs.items()}
    return [np.asarray(value) for value in ReferenceEvaluator(model).run(None, feeds)]


def _widen_graph(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == _FLOAT:
            value.type.tensor_type.elem_type = _DOUBLE
    _widen_nodes(graph.node)


def _widen_nodes(nodes: list[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _widen_graph(attribute.g)
            elif attribute.name in ("to", "dtype") and attribute.i == _FLOAT:
                attribute.i = _DOUBLE


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == _FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def step_of_rounding(path: Path) -> tuple[float, str]:
    """How far apart two values may fall that a node of a file rounds, and why; 0: it computes in float32."""
    model = onnx.load(path, load_external_data=False)
    if any(re.search(r"Quantize|^QLinear|^QGemm|^QAttention|Integer", node.op_type) for node in model.graph.node):
        return 1 / 255, "8-bit roundings flip"
    if any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in model.graph.initializer):
        return 2.0**-10, "16-bit roundings add up"
    return 0.0, ""


def node_by_node(path: Path, inputs: Mapping[str, Array]) -> tuple[float, str]:
    """The largest difference of a single node between onward and ONNX Runtime, both given ONNX Runtime's inputs to it.

    For quantized files: where an 8-bit rounding flips because a sum in float32 was added up in another order, all that
    follows differs, in ONNX Runtime itself between two levels of its optimization, and no node is wrong.

    Returns:
        the difference, relative as in `largest_difference`, and the node that has it.
    """
    model = onnx.load(path)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    known: dict[str, Array] = {**inputs, **_every_value(model, inputs)}
    worst, where = 0.0, ""
    for node in model.graph.node:
        made = [name for name in node.output if name in known]
        if not made or any(attribute.type == onnx.AttributeProto.GRAPH for attribute in node.attribute):
            continue
        given = [name for name in dict.fromkeys(node.input) if name in known and name not in stored]
        values = known
        if node.op_type == "DynamicQuantizeLSTM":
            # A recurrence amplifies the first rounding that flips; its first steps show whether it is right.
            values = {**known, node.input[0]: known[node.input[0]][:STEPS_OF_A_RECURRENCE]}
            alone = _node_alone(model, node, given, made, stored, {**values, **dict.fromkeys(made)})
            results = open_session(alone.SerializeToString()).run(None, {name: values[name] for name in given})
            values = {**values, **dict(zip(made, results, strict=True))}
        alone = _node_alone(model, node, given, made, stored, values)
        with torch.no_grad():
            computed = onward.to_torch(alone, fuse=False)(*(torch.from_numpy(values[name]) for name in given))
        ours = [value.numpy() for value in (computed if isinstance(computed, tuple) else (computed,))]
        difference = max(_difference(values[name], value) for name, value in zip(made, ours, strict=True))
        if difference > worst:
            worst, where = difference, f"{node.op_type} {node.name or node.output[0]}"
    return worst, where


def _every_value(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What ONNX Runtime, without its optimizations, computes at every node."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    there = {value.name for value in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in there)
    session = open_session(exposed.SerializeToString(), optimize=False)
    values = session.run(None, dict(inputs))
    return {
        one.name: value
        for one, value in zip(session.get_outputs(), values, strict=True)
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
    }


def _node_alone(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    given: Sequence[str],
    made: Sequence[str],
    stored: Mapping[str, onnx.TensorProto],
    known: Mapping[str, Array | None],
) -> onnx.ModelProto:
    """A model of one node with its initializers; outputs that are not known yet get no type."""

    def value_info(name: str) -> onnx.ValueInfoProto:
        value = known[name]
        if value is None:
            return onnx.ValueInfoProto(name=name)
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

    inner = [stored[name] for name in dict.fromkeys(node.input) if name in stored]
    graph = onnx.helper.make_graph(
        [node], "node", [value_info(name) for name in given], [value_info(name) for name in made], inner
    )
    opsets = list(model.opset_import)
    if node.domain and node.domain not in {opset.domain for opset in opsets}:
        opsets.append(onnx.helper.make_opsetid(node.domain, 1))
    return onnx.helper.make_model(
        graph, opset_imports=opsets, ir_version=model.ir_version, functions=list(model.functions)
    )


def _difference(expected: Array, actual: Array) -> float:
    """As in `largest_difference`; whole numbers count like real ones, so that a flipped rounding is 1 of 255."""
    if expected.shape != actual.shape or expected.size == 0:
        return 0.0 if expected.shape == actual.shape else float("inf")
    one, other = expected.astype(np.float64), actual.astype(np.float64)
    return float(np.abs(one - other).max() / max(1.0, np.abs(one).max()))
