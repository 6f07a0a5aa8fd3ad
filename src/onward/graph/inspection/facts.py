"""What a model is made of and what training would do with it, as a value; `inspection_text` writes it out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from onward.graph.adapters.targets import default_targets
from onward.graph.classical.side_outputs import WhyNotLowered
from onward.graph.cuts import CutPoint, find_cut_points, shape_of
from onward.graph.fusion.passes import Fusion, fuse
from onward.graph.nodes.iteration import every_node
from onward.graph.nodes.map_types import MAP_TYPES, MapTypes, describe_map
from onward.graph.nodes.shape_inference import inferred_values
from onward.graph.reading.dimensions import symbolic_dimensions
from onward.graph.reading.garbage_collection import without_collection
from onward.graph.reading.model_file import ModelSource
from onward.graph.repair.fixed_inputs import note_on_inputs
from onward.graph.repair.split_weights import Tie
from onward.graph.shared_inputs import layers_that_read_the_same
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.graph.weights.gradients import TRAINABLE_TYPES
from onward.graph.weights.names import WeightNames
from onward.parameters.limits import DEFAULT_LIMITS, Limits

Shape = tuple[int | str, ...] | None


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of the model."""

    name: str
    type: str
    shape: Shape


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A float initializer, or a quantized weight; `frozen_because` is empty for one that trains.

    `path` is that of the module it is of, where the file says more than the name.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    count: int
    bytes: int
    frozen_because: str
    path: str = ""

    @property
    def trains(self) -> bool:
        """Whether training changes it."""
        return not self.frozen_because

    @property
    def shown(self) -> str:
        """The module path and the name."""
        return f"{self.path} ({self.name})" if self.path else self.name


@dataclass(frozen=True, kw_only=True)
class OperatorUse:
    """One operator of the model and how often it occurs.

    `obstacle` says why it cannot be lowered, or is empty; `nodes` names where it is.
    """

    domain: str
    op_type: str
    version: int | None
    nodes: tuple[str, ...]
    obstacle: str

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return len(self.nodes)


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What `onward inspect` shows.

    Attributes:
        name: of the model, as it was given.
        producer: which program wrote it.
        ir_version: of the file format.
        opsets: domain -> version; the standard domain is `ai.onnx`.
        inputs, outputs: in the model's order; weights listed as inputs are left out.
        dimensions: symbolic dimension -> where it stands (`input_ids[0]`).
        weights: every float initializer and quantized weight, in the model's order.
        states: running statistics.
        ties: copies of weights, transposed or rearranged otherwise.
        known_as: module paths of weights.
        notes: what was changed on the way to training, and what the export lost.
        operators: most frequent first.
        cut_points: where the network can be cut between layers.
        fusions: fused nodes that training would use; the loss may add one more.
        joined: linear layers that read the same, group by group, by the names of their results.
        adapted: weights that `adapter` adapts where it names none -> outputs and inputs.
        node_count: of the graph with functions inlined, nested graphs included.
    """

    name: str
    producer: str
    ir_version: int
    opsets: Mapping[str, int]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    dimensions: Mapping[str, tuple[str, ...]]
    weights: tuple[Weight, ...]
    states: tuple[str, ...]
    ties: Mapping[str, Tie]
    known_as: WeightNames
    notes: tuple[str, ...]
    operators: tuple[OperatorUse, ...]
    cut_points: tuple[CutPoint, ...]
    fusions: tuple[Fusion, ...]
    joined: tuple[tuple[str, ...], ...]
    adapted: Mapping[str, tuple[int, int]]
    node_count: int

    @property
    def obstacles(self) -> tuple[OperatorUse, ...]:
        """The operators that keep the model from being lowered."""
        return tuple(operator for operator in self.operators if operator.obstacle)


@without_collection
def inspect(
    source: ModelSource,
    why_not_lowered: WhyNotLowered | None = None,
    limits: Limits = DEFAULT_LIMITS,
    training: TrainingGraph | None = None,
) -> Inspection:
    """Reads a model and says what is in it and what would train.

    Args:
        source: a path, a `ModelProto`, or an onnx-ir model.
        why_not_lowered: asked once for each operator; None: nothing is asked.
        limits: what the model may ask of the machine.
        training: the model as `make_training_graph` has read it; None: it is read here.

    Raises:
        ModelError: the model cannot be read.
    """
    training = training or make_training_graph(source, why_not_lowered=why_not_lowered, limits=limits)
    original = training.source
    maps = original.meta.get(MAP_TYPES) or {}
    operators = _operators(_without_functions(original), training.model, why_not_lowered)
    inferred = inferred_values(training.model)
    fused = fuse(training.model.clone(), training.weights, inferred=inferred)
    return Inspection(
        name=os.fspath(source) if isinstance(source, str | os.PathLike) else original.graph.name or "model",
        producer=" ".join(part for part in (original.producer_name, original.producer_version) if part),
        ir_version=original.ir_version,
        opsets={domain or "ai.onnx": version for domain, version in original.opset_imports.items()},
        inputs=tuple(_tensor(value, maps) for value in original.graph.inputs if not value.is_initializer()),
        outputs=tuple(_tensor(value, maps) for value in original.graph.outputs),
        dimensions=symbolic_dimensions(original),
        weights=_weights(training),
        states=training.states,
        ties=training.ties,
        known_as=training.known_as,
        notes=(*training.notes, *fused.missed, *note_on_inputs(original)),
        operators=operators,
        cut_points=_cut_points(training, inferred),
        fusions=fused.done,
        joined=layers_that_read_the_same(training.model.graph, training.weights),
        adapted=default_targets(training.model.graph, training.weights, training.known_as),
        node_count=sum(operator.count for operator in operators),
    )


def _cut_points(training: TrainingGraph, inferred: Mapping[str, ir.Value]) -> tuple[CutPoint, ...]:
    """The cut points, with inferred shapes where the model notes none."""
    points = find_cut_points(training.model.graph, training.weights)
    return tuple(
        replace(point, shape=shape_of(inferred[point.value]))
        if point.shape is None and point.value in inferred
        else point
        for point in points
    )


_TYPE_NAMES = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}


def _type_name(dtype: ir.DataType | None) -> str:
    return "?" if dtype is None else _TYPE_NAMES.get(dtype, dtype.name.lower())


def _tensor(value: ir.Value, maps: MapTypes) -> TensorInfo:
    if str(value.name) in maps:
        return TensorInfo(str(value.name), describe_map(maps[str(value.name)]), None)
    kind = _type_name(value.dtype)
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        kind = f"{type(value.type).__name__.removesuffix('Type').lower()} of {kind}"
    return TensorInfo(str(value.name), kind, shape_of(value))


def _weights(training: TrainingGraph) -> tuple[Weight, ...]:
    weights = []
    for name, value in training.model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or (tensor.dtype not in TRAINABLE_TYPES and name not in training.frozen):
            continue
        shape = tuple(int(size) for size in tensor.shape.numpy())
        reason = training.frozen.get(name, "")
        weights.append(
            Weight(
                name=name,
                type=_type_name(tensor.dtype),
                shape=shape,
                count=tensor.size,
                bytes=tensor.nbytes,
                frozen_because=reason,
                path=training.known_as.paths.get(name, ""),
            )
        )
    return tuple(weights)


def _without_functions(source: ir.Model) -> ir.Model:
    """The user's graph with functions inlined."""
    if not source.functions:
        return source
    model = source.clone()
    ir.passes.common.InlinePass()(model)
    return model


def _operators(model: ir.Model, computed: ir.Model, why_not_lowered: WhyNotLowered | None) -> tuple[OperatorUse, ...]:
    """The operators of `model`, its constants left out; only one that `computed` needs can be an obstacle."""
    needed = {(node.domain, node.op_type) for node in every_node(computed.graph)}
    nodes: dict[tuple[str, str], list[str]] = {}
    for node in every_node(model.graph):
        if node.op_type == "Constant" and node.domain == "" and not node.outputs[0].is_graph_output():
            continue
        first = next((str(value.name) for value in node.outputs if value.name), "")
        nodes.setdefault((node.domain, node.op_type), []).append(str(node.name or first))
    operators = []
    for (domain, op_type), names in nodes.items():
        version = model.opset_imports.get(domain)
        obstacle = ""
        if version is None:
            obstacle = f"the model imports no version of the domain {domain!r}"
        elif why_not_lowered is not None and (domain, op_type) in needed:
            obstacle = why_not_lowered(domain, op_type, version) or ""
        operators.append(
            OperatorUse(domain=domain, op_type=op_type, version=version, nodes=tuple(names), obstacle=obstacle)
        )
    return tuple(sorted(operators, key=lambda operator: (-operator.count, operator.op_type)))
