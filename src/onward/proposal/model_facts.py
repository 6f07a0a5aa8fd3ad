"""What matters of a model for a proposal, read from its file: inputs, outputs, what it ends in, and what trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.adapters.targets import default_targets
from onward.graph.classical.class_names import find_class_names
from onward.graph.new_head import has_head
from onward.graph.nodes.iteration import every_node
from onward.graph.nodes.shape_inference import inferred_values
from onward.graph.operators import Fact, operators_with
from onward.graph.reading.garbage_collection import without_collection
from onward.graph.repair.fixed_inputs import propose_fixed_inputs
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.lowering.inspection import why_not_lowered
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.proposal.initialization import Origin, find_origin
from onward.spelling import shortened

Infer = Callable[[], Mapping[str, ir.Value]]
Size = int | str

_MOVES = operators_with(Fact.SAME_ELEMENTS) | {"Cast", "Slice"}
"""Operators that only move elements."""

_KEEPS_RANGE = _MOVES | {"Clip", "DequantizeLinear", "Gather", "QuantizeLinear", "ReduceMean"}
"""Operators that leave probabilities probabilities; what a model ends in is looked for before them."""

_FLOATS = frozenset({"float32", "float64", "float16", "bfloat16"})


@dataclass(frozen=True)
class Port:
    """An input or output.

    Attributes:
        name: in the graph.
        dtype: numpy's name of its element type, "string", or "?".
        shape: with the batch axis first; open sizes by their names, "?" for those without; None: unknown.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...] | None

    @property
    def sample(self) -> tuple[Size, ...] | None:
        """The shape of one sample."""
        return None if self.shape is None else self.shape[1:]

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return self.dtype in _FLOATS

    def __str__(self) -> str:
        shape = "of unknown rank" if self.shape is None else f"[{', '.join(map(str, self.shape))}]"
        return f"{self.name!r} {self.dtype} {shape}"


@dataclass(frozen=True)
class BatchProof:
    """Whether a graph whose batch size is fixed computes any number of samples once it is rewritten.

    Attributes:
        difference: the largest between samples in one batch and one by one, relative; None: it cannot be rewritten.
        reason: why not.
    """

    difference: float | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model as far as a proposal needs it.

    Attributes:
        path: of the file.
        inputs, outputs: tensors only, in the model's order; weights listed as inputs are left out.
        ends_in: output -> operator that computes its elements, what only moves them left out.
        before_selection: output of class numbers (ArgMax) -> the float value that they are picked from.
        needed: output -> inputs that it depends on.
        operators: how often each occurs.
        weights: trainable weights -> shapes.
        frozen: float initializers that are not trainable -> why.
        origin: whether the weights look trained, and the evidence.
        tables: input of whole numbers -> rows of the table that it indexes, the vocabulary of token ids.
        positions: rows of a learned table of positions: the longest sequence; None: no such table was found.
        scaled_inputs: inputs that the model itself scales first, as `x / 255`.
        value_names: names of all values that are no inputs; none of them can name a label.
        fixed_inputs: inputs that no sample has, as an initial state, with the number that fills them.
        batch_proof: whether it trains with another batch size than the file fixes; None: not looked at, or it is open.
        class_names: that the model itself gives to its classes, in their order; numbers as text.
        replaceable: outputs whose last layer can be given another number of classes.
        adapted: what adapters would be trained next to, integers too, with their outputs and inputs.
        limits: what it may ask of the machine.
    """

    path: Path
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    ends_in: Mapping[str, str]
    before_selection: Mapping[str, Port]
    needed: Mapping[str, tuple[str, ...]]
    operators: Mapping[str, int]
    weights: Mapping[str, tuple[int, ...]]
    frozen: Mapping[str, str]
    origin: Origin
    tables: Mapping[str, int]
    positions: int | None
    scaled_inputs: frozenset[str]
    value_names: frozenset[str]
    fixed_inputs: Mapping[str, float] = field(default_factory=dict)
    batch_proof: BatchProof | None = None
    class_names: tuple[str, ...] = ()
    replaceable: frozenset[str] = frozenset()
    adapted: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    limits: Limits = DEFAULT_LIMITS

    @property
    def element_count(self) -> int:
        """Elements of all trainable weights."""
        return sum(int(np.prod(shape, dtype=np.int64)) for shape in self.weights.values())

    @property
    def fixed_batch(self) -> int | None:
        """The batch size that the file fixes, if it does; where one input leaves it open, it is open."""
        sizes = [port.shape[0] for port in self.inputs if port.shape and port.name not in self.fixed_inputs]
        fixed = [size for size in sizes if isinstance(size, int)]
        return fixed[0] if fixed and len(fixed) == len(sizes) else None

    @property
    def only_batch(self) -> int | None:
        """The one batch size that it trains with; None: it trains with any."""
        proof = self.batch_proof
        return self.fixed_batch if proof is None or proof.difference is None else None

    @property
    def is_transformer(self) -> bool:
        """Whether it looks like one: attention, or softmax between matmuls with layer normalization."""
        has = self.operators.get
        return bool(has("Attention") or has("MultiHeadAttention") or has("GroupQueryAttention")) or (
            bool(has("Softmax")) and self._norms > 0 and has("MatMul", 0) >= 4
        )

    @property
    def _norms(self) -> int:
        names = ("LayerNormalization", "RMSNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization")
        written_out = min(self.operators.get("ReduceMean", 0), self.operators.get("Sqrt", 0))
        return sum(self.operators.get(name, 0) for name in names) + written_out

    @property
    def is_convolutional(self) -> bool:
        """Whether it is made of convolutions."""
        return self.operators.get("Conv", 0) > 0 and not self.is_transformer

    @property
    def is_recurrent(self) -> bool:
        """Whether it has recurrent layers."""
        return any(self.operators.get(name) for name in ("LSTM", "GRU", "RNN"))

    @property
    def has_batch_normalization(self) -> bool:
        """Whether running statistics change in training."""
        return bool(self.operators.get("BatchNormalization"))

    @property
    def stores_statistics(self) -> bool:
        """Whether the file holds running statistics of batch normalization."""
        return any("running statistic" in why for why in self.frozen.values())

    def port(self, name: str) -> Port | None:
        """An input or output of this name."""
        return next((port for port in (*self.inputs, *self.outputs) if port.name == name), None)


@without_collection
def read_model_facts(path: Path, limits: Limits = DEFAULT_LIMITS, training: TrainingGraph | None = None) -> ModelFacts:
    """Reads a model that may ask for so much of the machine, where `make_training_graph` has not read it yet.

    Raises:
        ModelError: it cannot be read, holds operators that cannot be computed, or nothing in it is trainable.
    """
    training = training or make_training_graph(path, why_not_lowered=why_not_lowered, limits=limits)
    graph, infer = training.source.graph, cache(lambda: inferred_values(training.source))
    operators = Counter(node.op_type for node in every_node(training.model.graph))
    _refuse_obstacles(training, path)
    outputs = tuple(_port(value, infer) for value in training.model.graph.outputs if _is_tensor(value))
    weights = _shapes_of_weights(training)
    ends = {str(value.name): _origin_node(value) for value in training.model.graph.outputs}
    facts = ModelFacts(
        path=path,
        inputs=tuple(_port(v, dict) for v in graph.inputs if not v.is_initializer() and _is_tensor(v)),
        outputs=outputs,
        ends_in={name: "" if node is None else node.op_type for name, node in ends.items()},
        before_selection=_before_selection(ends, infer),
        needed={port.name: _needed_inputs(training.model, port.name) for port in outputs},
        operators=operators,
        weights=weights,
        frozen=training.frozen,
        origin=find_origin(training) if weights else Origin(True, "its layers are quantized, as after training"),
        tables=_tables(training.model),
        positions=_position_rows(training),
        scaled_inputs=_scaled_inputs(training.model),
        value_names=_value_names(training.source) | _value_names(training.model),
        fixed_inputs=propose_fixed_inputs(training.source),
        class_names=find_class_names(training.source),
        replaceable=frozenset(name for name in ends if has_head(graph, name)),
        adapted=default_targets(training.model.graph, weights, training.known_as),
        limits=limits,
    )
    _refuse_untrainable(facts)
    return facts


def _refuse_obstacles(training: TrainingGraph, path: Path) -> None:
    found: dict[str, str] = {}
    for node in every_node(training.model.graph):
        version = training.model.opset_imports.get(node.domain)
        if version is None or f"{node.domain}:{node.op_type}" in found:
            continue
        reason = why_not_lowered(node.domain, node.op_type, version)
        if reason:
            found[f"{node.domain or 'ai.onnx'}:{node.op_type}"] = reason
    if found:
        listed = shortened((f"{name} ({reason})" for name, reason in found.items()), 5, "; ")
        raise ModelError(
            f"{str(path)!r} cannot be trained: it has {len(found)} kinds of operators that onward cannot compute: "
            f"{listed}. Export the model without them, or cut the model before them with onnx.utils.extract_model."
        )


def _refuse_untrainable(facts: ModelFacts) -> None:
    if not facts.inputs:
        raise ModelError(
            f"{str(facts.path)!r} has no input tensor, so it cannot be trained on data. Export it with its inputs."
        )
    if facts.weights or facts.adapted:
        return
    reasons = Counter(facts.frozen.values())
    said = "; ".join(f"{count} because: {reason}" for reason, count in reasons.most_common(4))
    quantized = [name for name in facts.operators if name.startswith(("QLinear", "MatMulInteger", "ConvInteger"))]
    quantized += [name for name in ("DequantizeLinear", "QGemm") if name in facts.operators]
    if quantized:
        raise ModelError(
            f"{str(facts.path)!r} has no trainable weights: it is quantized ({', '.join(quantized)}), and integers "
            f"have no gradient. Dequantize it (onward export {facts.path} --dequantize qdq -o float.onnx), or take the "
            "model from before quantization; train that, and quantize the result (onward export --quantize)."
        )
    if any("Tree" in name for name in facts.operators):
        raise ModelError(
            f"{str(facts.path)!r} has no trainable weights: it consists of decision trees, which have no gradient. Fit "
            "them again with the library that created them, or put trainable layers after them."
        )
    raise ModelError(
        f"{str(facts.path)!r} has no trainable weights. Its {len(facts.frozen)} float initializers are not trainable"
        + (f": {said}" if said else "")
        + ". Run onward inspect to list them; set training.weights_to_train to those to train."
    )


def _is_tensor(value: ir.Value) -> bool:
    return value.type is None or isinstance(value.type, ir.TensorType)


def _port(value: ir.Value, infer: Infer) -> Port:
    if value.dtype is None or value.shape is None:
        known = infer().get(str(value.name), value)
        shape = known.shape if value.shape is None else value.shape
        value = ir.Value(name=value.name, type=value.type or known.type, shape=shape)
    return Port(str(value.name), _dtype_name(value.dtype), None if value.shape is None else _sizes(value.shape))


def _sizes(shape: ir.Shape) -> tuple[Size, ...]:
    """Sizes of a shape; some exporters write -1 for an open one."""
    return tuple(size if isinstance(size, int) and size >= 0 else _open_size(size) for size in shape)


def _open_size(size: int | ir.SymbolicDim) -> str:
    return "?" if isinstance(size, int) else str(size.value or "?")


def _dtype_name(dtype: ir.DataType | None) -> str:
    return "?" if dtype is None else {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())


def _shapes_of_weights(training: TrainingGraph) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name in training.weights:
        tensor = training.model.graph.initializers[name].const_value
        assert tensor is not None
        shapes[name] = tuple(int(size) for size in tensor.shape.numpy())
    return shapes


def _origin_node(value: ir.Value) -> ir.Node | None:
    """The node that computes the elements of a value, what keeps their range left out; of branches, the first."""
    node = value.producer()
    while node is not None and node.domain == "":
        if node.op_type == "If":
            place = list(node.outputs).index(value)
            value = node.attributes["then_branch"].as_graph().outputs[place]
        elif node.op_type in _KEEPS_RANGE and node.inputs[0] is not None:
            value = node.inputs[0]
        else:
            return node
        before = value.producer()
        if before is None:
            return node
        node = before
    return node


def _before_selection(ends: Mapping[str, ir.Node | None], infer: Infer) -> dict[str, Port]:
    """Outputs that only pick the best class, with the value that they pick from."""
    found = {}
    for name, node in ends.items():
        if node is not None and node.op_type in ("ArgMax", "TopK") and node.inputs[0] is not None:
            found[name] = _port(node.inputs[0], infer)
    return found


def _needed_inputs(model: ir.Model, output: str) -> tuple[str, ...]:
    value = next((one for one in model.graph.outputs if one.name == output), None)
    inputs = {str(one.name) for one in model.graph.inputs if not one.is_initializer()}
    seen, visited = set[str](), set[int]()
    waiting = [] if value is None else [value]
    while waiting:
        one = waiting.pop()
        if id(one) in visited:
            continue
        visited.add(id(one))
        if one.name in inputs:
            seen.add(str(one.name))
        node = one.producer()
        if node is not None:
            waiting += [read for read in node.inputs if read is not None]
            for attribute in node.attributes.values():
                if attribute.type is ir.AttributeType.GRAPH:
                    nested = every_node(attribute.as_graph())
                    waiting += [read for inner in nested for read in inner.inputs if read is not None]
    return tuple(name for name in (str(one.name) for one in model.graph.inputs) if name in seen)


def _tables(model: ir.Model) -> dict[str, int]:
    """Inputs that index the rows of tables, through casts and reshapes -> rows of the largest of them."""
    found: dict[str, int] = {}
    origin = {value: str(value.name) for value in model.graph.inputs if not value.is_initializer()}
    for node in model.graph:
        read = list(node.inputs)
        if node.op_type in _MOVES and read and read[0] in origin:
            origin[node.outputs[0]] = origin[read[0]]
        if node.op_type == "Gather" and read[1] in origin and read[0] is not None and read[0].shape is not None:
            size = read[0].shape[node.attributes.get_int("axis", 0)]
            if isinstance(size, int) and len(read[0].shape) == 2:
                name = origin[read[1]]
                found[name] = max(size, found.get(name, 0))
    return found


def _position_rows(training: TrainingGraph) -> int | None:
    """How many positions a learned table of positions has, told by its name."""
    for name, value in training.model.graph.initializers.items():
        shape = value.shape
        is_named = any(part in name.lower() for part in ("position_emb", "pos_emb", "wpe", "embed_positions"))
        if is_named and shape is not None and len(shape) >= 2 and isinstance(shape[-2], int) and shape[-2] > 1:
            return int(shape[-2])
    return None


def _scaled_inputs(model: ir.Model) -> frozenset[str]:
    found = set()
    for value in model.graph.inputs:
        reader = value
        while len(uses := list(reader.uses())) == 1:
            node = uses[0].node
            if node.op_type in ("Mul", "Div", "Sub"):
                others = [one for one in node.inputs if one is not None and one is not reader]
                if others and all(one.const_value is not None and one.const_value.size <= 4 for one in others):
                    found.add(str(value.name))
            if node.op_type not in ("Cast", "Transpose", "Identity"):
                break
            reader = node.outputs[0]
    return frozenset(found)


def _value_names(model: ir.Model) -> frozenset[str]:
    graph = model.graph
    computed = {str(value.name) for node in graph for value in node.outputs}
    return frozenset(computed | {str(value.name) for value in graph.outputs} | set(graph.initializers))
