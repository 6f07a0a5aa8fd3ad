"""Which frozen weights are stored in fewer bits: linear layers, as bitsandbytes chooses them, or all for bf16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onward.graph.fusion.rewriting import DOMAIN as FUSED
from onward.graph.nodes.known_values import integer, integers
from onward.graph.operators import Fact, has_fact
from onward.graph.training_graph import TrainingGraph
from onward.graph.weights.frozen_weights import (
    LARGEST_TABLE_ELEMENTS,
    constant_sources,
    find_frozen_weights,
    is_product,
)
from onward.parameters.frozen_weights import QUANTIZED_DTYPES, FrozenDtype, FrozenWeights
from onward.spelling import shortened

LAST_LAYER, EMBEDDING = "a last layer", "an embedding"
SMALL = f"{LARGEST_TABLE_ELEMENTS:,} elements or fewer"
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class StoredBase:
    """How frozen weights are stored, the same for every rank.

    Attributes:
        dtype: of all that are chosen.
        block_size: elements that share a scale.
        axes: initializer -> its axis that products sum over; 0 where the type has no blocks.
        others: frozen weight that stays as it is -> why.
        bytes_before: of the chosen ones as the file stores them.
    """

    dtype: FrozenDtype = "as_stored"
    block_size: int = 64
    axes: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    bytes_before: int = 0

    def describe(self, graph: TrainingGraph) -> str:
        """What is stored in fewer bits and what is not, for the user."""
        blocks = f" in blocks of {self.block_size}" if self.dtype in QUANTIZED_DTYPES else ""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.others.items():
            reasons.setdefault(reason, []).append(graph.known_as.shown(name))
        kept = "; ".join(f"{shortened(names, _LISTED)}: {reason}" for reason, names in reasons.items())
        return (
            f"frozen_weights.dtype: {len(self.axes)} frozen weights ({self.bytes_before / 1e6:,.1f} MB in the file) "
            f"are stored in {self.dtype}{blocks} in memory" + (f"; not these ({kept})." if kept else ".")
        )


def choose_base(graph: TrainingGraph, settings: FrozenWeights) -> StoredBase:
    """Chooses by the entire graph, so that a stage of a pipeline does not take its own last layer for the last one."""
    if settings.dtype == "as_stored":
        return StoredBase()
    main = graph.model.graph
    frozen = find_frozen_weights(main, (*graph.weights, *graph.states))
    chosen = frozen.weights - set(() if graph.loss_names is None else graph.loss_names.constants)  # a teacher's
    stored = [value for name, value in main.initializers.items() if name in chosen and value.dtype in _FLOATS]
    last = _last_products(graph) if settings.dtype in QUANTIZED_DTYPES else set()
    axes, others, total = dict[str, int](), dict[str, str](), 0
    for value in stored:
        found = _summed_axis(value, last) if settings.dtype in QUANTIZED_DTYPES else _why_not_narrower(value)
        if isinstance(found, str):
            others[str(value.name)] = found
        else:
            assert value.const_value is not None
            axes[str(value.name)] = found
            total += value.const_value.nbytes
    others |= dict.fromkeys(_small_matrices(graph), SMALL)
    return StoredBase(
        dtype=settings.dtype, block_size=settings.block_size, axes=axes, others=others, bytes_before=total
    )


def _small_matrices(graph: TrainingGraph) -> list[str]:
    """Frozen matrices of layers that are too small to be told from tables, in the order of the graph."""
    main = graph.model.graph
    sources = constant_sources(main, (*graph.weights, *graph.states))
    read = {
        one for node in main if is_product(node) for value in node.inputs if value in sources for one in sources[value]
    }
    return [
        name
        for name, value in main.initializers.items()
        if value in read and value.const_value is not None and len(value.const_value.shape) == 2
        if value.dtype in _FLOATS and value.const_value.size <= LARGEST_TABLE_ELEMENTS
    ]


def _why_not_narrower(value: ir.Value) -> int | str:
    return f"{value.dtype} already" if value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else 0


def _summed_axis(value: ir.Value, last: set[ir.Node]) -> int | str:
    """The axis of a weight that its products sum over, or why it is not quantized."""
    found, others = set[int](), list[str]()
    for use in value.uses():
        node, index = use.node, use.idx
        axes = list(range(len(value.shape or ())))
        while _is_transpose(node) and len(node.outputs[0].uses()) == 1:
            axes = [axes[place] for place in integers(node, "perm") or reversed(axes)]
            node, index = next((after.node, after.idx) for after in node.outputs[0].uses())
        if node.op_type == "Gather" and index == 0:
            return EMBEDDING
        if node in last:
            return LAST_LAYER
        if has_fact(node.op_type, Fact.CONVOLUTION):
            return "a convolution"
        place = _axis_of_operand(node, index, len(axes))
        if place is None:
            others.append(node.op_type)
        else:
            found.add(axes[place])
    if len(found) > 1:
        return "summed over along different axes"
    # What reads it besides, like the norm of a DoRA adapter, reads the dequantized weight.
    return found.pop() if found else f"read by {others[0]}"


def _is_transpose(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == ("", "Transpose")


def _axis_of_operand(node: ir.Node, index: int, rank: int) -> int | None:
    """Which axis of an operand a product sums over; None for other operators."""
    if node.domain not in ("", FUSED) or rank < 2:
        return None
    if node.op_type == "MatMul":
        return rank - 1 if index == 0 else rank - 2
    if node.op_type == "Gemm" and index < 2:
        is_transposed = integer(node, "transA" if index == 0 else "transB", 0)
        return int((index == 0) != bool(is_transposed))
    if node.op_type == "Linear" and index == 1:
        return int(bool(integer(node, "rows_are_outputs", 0)))
    return None


def _last_products(graph: TrainingGraph) -> set[ir.Node]:
    """Products that no other one follows on the way to the loss, or to the outputs of a graph without one."""
    main = graph.model.graph
    changing = {*graph.weights, *graph.states}
    stored = {value for name, value in main.initializers.items() if name in changing}
    stored |= {main.initializers[name] for name in find_frozen_weights(main, changing).weights}
    by_name = {str(value.name): value for node in main for value in node.outputs}
    stack = [by_name[graph.loss]] if graph.loss in by_name else [*main.outputs]
    found, seen = set[ir.Node](), set[ir.Value]()
    while stack:
        value = stack.pop()
        node = value.producer()
        if node is None or value in seen:
            continue
        seen.add(value)
        if _multiplies_stored(node, stored):
            found.add(node)
        else:
            stack.extend(source for source in node.inputs if source is not None)
    # A loss may compare a hidden layer with a teacher's, too.
    return {node for node in found if not _is_followed(node, stored)}


def _is_followed(node: ir.Node, stored: set[ir.Value]) -> bool:
    """Whether another product follows."""
    seen, stack = {node}, [node]
    while stack:
        for after in stack.pop().successors():
            if _multiplies_stored(after, stored):
                return True
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return False


def _multiplies_stored(node: ir.Node, stored: set[ir.Value]) -> bool:
    if not (is_product(node) or ("CrossEntropy" in node.op_type and node.domain == FUSED)):
        return False
    for value in node.inputs:
        producer = None if value is None else value.producer()
        source = value if producer is None or not _is_transpose(producer) else producer.inputs[0]
        if source in stored:
            return True
    return False
