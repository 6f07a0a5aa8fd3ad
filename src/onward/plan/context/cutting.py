"""The graph that every context rank computes: each its own tokens, with operators that gather, add up or take parts.

Every operator that exchanges has the gradient of what it computes: that of a gathered value is added up over the ranks.
So each rank's gradient of a weight is that of the sum of all ranks' losses by its own copy, and the mean over the
replicas, which data parallelism takes anyway, is the gradient: nothing after this pass knows of context parallelism.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from onward.errors import ParametersError
from onward.graph.fusion.cross_entropy import FUSED_LOSS
from onward.graph.nodes.provenance import module_scope
from onward.graph.nodes.structure import label
from onward.graph.operators import Fact, has_fact
from onward.graph.training_graph import TrainingGraph
from onward.graph.weights.gradients import TRAINABLE_TYPES
from onward.plan.context.convolutions import fold_padding
from onward.plan.context.editing import ContextEditor
from onward.plan.context.mixing import how_positions_meet, why_no_sequence
from onward.plan.context.ranges import TokenCut, axis_of
from onward.plan.context.rules import SCALING, CutNode, Cuts, cut_node
from onward.plan.context.sequences import find_products, find_sequences
from onward.plan.horizontal.cuts import DOMAIN, CannotShardError, SetEntry, Sizes, WeighMean
from onward.plan.horizontal.regions import PartitioningContext

FIXED_LENGTHS = "onward.fixed_lengths"
"""Key of a rank's graph: why its inputs have the sizes that they have, for those whose data have others."""
LEAST_SHARE = 0.5
"""Of the elements of all activations, what has to be cut for context parallelism to be worth its name."""
_MOST_NAMED = 4
_PRODUCTS = frozenset({"MatMul", "Einsum"})


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """What context ranks share.

    Attributes:
        size: ranks that share the sequences of the same samples.
        graph: what each of them computes; None: the graph as it is.
        lengths: of the sequences that are cut.
        share: of the elements of all activations, the part that is cut.
        in_full: modules or nodes that every rank computes in full, since they need all tokens at once -> their part of
            the elements of all activations.
    """

    size: int = 1
    graph: TrainingGraph | None = field(default=None, repr=False)
    lengths: tuple[int, ...] = ()
    share: float = 0.0
    in_full: Mapping[str, float] = field(default_factory=dict)

    def of(self, graph: TrainingGraph) -> TrainingGraph:
        """The graph that a rank computes, of the one that the plan was made for."""
        return graph if self.graph is None else self.graph

    @property
    def notes(self) -> tuple[str, ...]:
        """For the user, one sentence each."""
        if self.graph is None:
            return ()
        lengths = " and ".join(map(str, self.lengths))
        text = (
            f"context parallelism: {self.size} ranks share sequences of {lengths} tokens; {self.share:.0%} of the "
            "activations' elements are cut"
        )
        if not self.in_full:
            return (f"{text}.",)
        return (
            f"{text}. Computed in full on every rank, from gathered values, with their part of all elements: "
            f"{self.named_in_full}.",
        )

    @property
    def named_in_full(self) -> str:
        """What is computed in full, the largest first."""
        named = [f"{name} {part:.1%}" for name, part in list(self.in_full.items())[:_MOST_NAMED]]
        more = f" and {len(self.in_full) - _MOST_NAMED} more" if len(self.in_full) > _MOST_NAMED else ""
        return ", ".join(named) + more


def plan_context(
    graph: TrainingGraph, size: int, shapes: Mapping[str, Sizes], numbers: Mapping[str, Any], samples: int = 0
) -> ContextPlan:
    """Finds the sequences of a graph, and cuts what is computed of them.

    Args:
        graph: the full network with its loss; it is left as it is.
        size: how many ranks share a sequence.
        shapes, numbers: what its values are for one micro-batch.
        samples: of that micro-batch: a prime number that divides no other size of the model, by which what has the
            samples of a batch is known, so that the plan is for batches of any number; 0: the model fixes it.

    Raises:
        ParametersError: no sequence is found, or too little could be cut.
    """
    if size == 1:
        return ContextPlan()
    model = graph.model.clone()
    model.opset_imports[DOMAIN] = 1
    copy = replace(graph, model=model)
    _fix_lengths(model, shapes, samples)
    known = dict(shapes)
    partitioning = PartitioningContext(copy, known, dict(numbers))
    if fold_padding(partitioning, known):
        partitioning = PartitioningContext(copy, known, dict(numbers))
    partitioning.facts = replace(partitioning.facts, norms_over_ranks=True)
    sequences = find_sequences(partitioning, size)
    if not sequences:
        raise ParametersError(
            f"distributed.context_parallel_size is {size}, but {why_no_sequence(partitioning, size)}. Set it to 1, and "
            "use data, tensor or pipeline parallelism."
        )
    cutter = _Cutter(partitioning, sequences, size, samples)
    cutter.run()
    share = cutter.share()
    lengths = tuple(sorted({cut.tokens[0] for cut in sequences.values()}))
    model.metadata_props[FIXED_LENGTHS] = (
        f" Context parallelism was planned for sequences of {' and '.join(map(str, lengths))}: pad or cut those of all "
        "training and test data to the same length."
    )
    plan = ContextPlan(
        size=size,
        graph=copy,
        lengths=lengths,
        share=share,
        in_full=cutter.in_full(),
    )
    if share < LEAST_SHARE:
        raise ParametersError(
            f"distributed.context_parallel_size is {size}, but only {share:.0%} of the activations could be cut along "
            f"their sequences. These need all tokens at once, with their part of all elements: {plan.named_in_full}. "
            "Set it to 1, and use data, tensor or pipeline parallelism."
        )
    return plan


def _fix_lengths(model: ir.Model, shapes: Mapping[str, Sizes], samples: int) -> None:
    """The inputs of a rank's graph have the planned sizes, but for the batch's, so that no other data are read."""
    for value in model.graph.inputs:
        known = shapes.get(str(value.name))
        if value.shape is not None and known is not None:
            pairs = zip(value.shape, known, strict=True)
            value.shape = ir.Shape([size if samples and number % samples == 0 else number for size, number in pairs])


def _most_telling(operators: Mapping[str, int]) -> str:
    """Of a module's operators, that by which positions meet, else that which computes most."""
    return max(operators, key=lambda one: (how_positions_meet(one) is not None, operators[one]))


def _called(node: ir.Node, graph: TrainingGraph) -> str:
    """A node by the module that it belongs to, by its weights, or by its own name."""
    weights = [str(v.name) for v in node.inputs if v is not None and str(v.name) in graph.weights]
    named = module_scope(node) or (graph.known_as.shown(weights[0]) if weights else "") or node.name
    return repr(named or node.outputs[0].name)


class _Cutter:
    """Visits a graph's nodes in order, and rewrites each for a rank's own tokens."""

    def __init__(
        self, partitioning: PartitioningContext, sequences: Mapping[ir.Value, TokenCut], size: int, samples: int
    ) -> None:
        self.partitioning, self.sequences, self.size, self.samples = partitioning, sequences, size, samples
        self.editor = ContextEditor(partitioning, size, samples)
        self.queries = {node: index for node, (index, _) in find_products(partitioning).items()}
        self.scores: set[ir.Value] = set()

    def run(self) -> None:
        for node in self.partitioning.nodes:
            if node in self.queries or (node.op_type not in _PRODUCTS and self.scores.intersection(node.inputs)):
                self.scores.update(node.outputs)
            self._visit(node)
        for value in list(self.partitioning.main.outputs):
            if value is not None and value in self.editor.cuts:
                self.editor.give_out(value)

    def share(self) -> float:
        """Of the elements of real values that nodes compute from the inputs, the part that is cut."""
        cut = total = 0
        for node in self.partitioning.nodes:
            for value in node.outputs:
                shape = self.editor.shapes.get(str(value.name))
                if shape is not None and self._is_activation(value):
                    total += math.prod(shape)
                    cut += math.prod(shape) * (value in self.editor.cuts)
        return cut / total if total else 0.0

    def in_full(self) -> dict[str, float]:
        """What every rank computes in full, from gathered values, and as much of as a sequence holds, or more.

        By module, as parts of the elements of all activations, the largest first.
        """
        found, operators = Counter[str](), dict[str, Counter[str]]()
        gathered, total = set(self.editor.full.values()), 0
        for node in self.partitioning.nodes:
            sizes = [math.prod(self.editor.shapes.get(str(v.name), ())) for v in node.outputs if self._is_activation(v)]
            total += sum(sizes)
            if not any(value in gathered for value in node.inputs):
                continue
            gathered.update(value for value in node.outputs if value not in self.editor.cuts)
            is_view = has_fact(node.op_type, Fact.VIEW | Fact.SAME_ELEMENTS)
            if is_view or not sizes or any(value in self.editor.cuts for value in node.outputs):
                continue
            name = _called(node, self.partitioning.graph)
            found[name] += sum(sizes)
            operators.setdefault(name, Counter())[node.op_type] += sum(sizes)
        least = min(math.prod(self.editor.shapes[str(value.name)]) for value in self.sequences) // 2
        return {
            f"{name} ({_most_telling(operators[name])})": size / total
            for name, size in found.most_common()
            if size >= least
        }

    def _is_activation(self, value: ir.Value) -> bool:
        depends = value in self.partitioning.trained and str(value.name) in self.partitioning.facts.from_inputs
        return depends and (value.dtype is None or value.dtype in TRAINABLE_TYPES)

    def _visit(self, node: ir.Node) -> None:
        for inner in _nested(node):
            for index, value in enumerate(inner.inputs):
                if value is not None and value in self.editor.cuts:
                    inner.replace_input_with(index, self.editor.gathered(value, node))
        known = {i: self.editor.cuts[v] for i, v in enumerate(node.inputs) if v is not None and v in self.editor.cuts}
        wanted = {o: self.sequences[v] for o, v in enumerate(node.outputs) if v in self.sequences}
        if known:
            found = self._resolve(node, known)
            if found is None:
                self._in_full(node, known)
                return
            for index in known.keys() - found.assignment.inputs.keys():
                self.editor.gather(node, index)
            self._apply(node, found)
        elif wanted:
            try:
                found = self._cut(node, {}, wanted)
            except CannotShardError:
                found = None
            if found is not None and not found.assignment.partial and found.assignment.outputs:
                self._apply(node, found)
            else:
                for index, cut in wanted.items():
                    self.editor.share_among(node.outputs[index], cut)

    def _cut(self, node: ir.Node, inputs: Cuts, outputs: Cuts) -> CutNode:
        found = cut_node(self.partitioning.context(node), inputs, outputs, self.size)
        made: list[TokenCut] = [*found.assignment.inputs.values(), *found.assignment.outputs.values()]  # type: ignore[list-item]
        axes = [axis_of(cut, self.samples) for cut in made]
        if any(axis is None for axis in axes):
            raise CannotShardError(f"{label(node)}: its tokens are not those of one sample")
        known = [axis for axis in axes if axis is not None]
        if any(axis.local_length(rank, self.size) == 0 for axis in known for rank in range(self.size)):
            raise CannotShardError(f"{label(node)}: a rank would have nothing")
        merges = node.op_type in SCALING or node.op_type == FUSED_LOSS
        kinds = {axis.samples for axis in known}
        is_of_one = found.attention is not None or found.halo is not None
        if (len(kinds) > 1 and not merges) or (is_of_one and kinds != {"none"}):
            raise CannotShardError(f"{label(node)}: tokens of one sample meet those of several")
        return found

    def _resolve(self, node: ir.Node, known: Cuts) -> CutNode | None:
        """The most that can stay cut of a node's operands; None where all must be gathered."""

        def held(indices: Sequence[int]) -> int:
            values = [node.inputs[index] for index in indices]
            return sum(math.prod(self.editor.shapes.get(str(v.name), ())) for v in values if v is not None)

        for count in range(len(known), 0, -1):
            choices = list(itertools.combinations(sorted(known), count)) if len(known) <= 4 else [tuple(known)]
            if node.op_type != "MatMul":
                choices.sort(key=held, reverse=True)
            queries = self.queries.get(node)
            of_scores = [i for i in known if node.inputs[i] in self.scores] if node.op_type in _PRODUCTS else []
            first = [queries] if queries is not None else of_scores  # of queries and keys, the queries stay cut
            choices.sort(key=lambda kept: not set(first) <= set(kept))
            for kept in choices:
                try:
                    found = self._cut(node, {i: known[i] for i in kept}, {})
                except CannotShardError:
                    continue
                made = found.assignment
                if all(i not in made.inputs for i in known.keys() - set(kept)) and (
                    made.outputs or made.partial or made.gathers
                ):
                    return found
            if len(known) > 4:
                break
        return None

    def _in_full(self, node: ir.Node, known: Cuts) -> None:
        """Every rank computes the node, and continues with its own part of the result where the axis is still there."""
        for index in known:
            self.editor.gather(node, index)
        for value in node.outputs:
            shape = self.editor.shapes.get(str(value.name), ())
            for index, cut in known.items():
                read = self.editor.shapes.get(str(node.inputs[index].name), ())  # type: ignore[union-attr]
                keeps_axes = len(read) == len(shape) or has_fact(
                    node.op_type, Fact.RECURRENT
                )  # else an equal size is a coincidence
                is_same = keeps_axes and cut.axis < len(shape) and shape[cut.axis] == sum(cut.blocks)
                if is_same and value.name and self._is_activation(value):
                    self.editor.share_among(value, cut)
                    break

    def _apply(self, node: ir.Node, found: CutNode) -> None:
        made = found.assignment
        for index, cut in made.inputs.items():
            value = node.inputs[index]
            if value is not None and value not in self.editor.cuts:
                node.replace_input_with(index, self.editor.part(value, cut, node))  # type: ignore[arg-type]
        for edit in made.edits:
            if isinstance(edit, SetEntry) and edit.cut is not None:
                self.editor.set_entry(node, edit)
            elif not isinstance(edit, WeighMean | SetEntry):
                self.editor.become(node, "ContextDropout", {"ranks": self.size})
        if found.attention is not None:
            queries, keys = found.attention
            self.editor.become(
                node,
                "ContextAttention",
                {
                    "ranks": self.size,
                    "query_blocks": queries.tokens,
                    "query_rows": queries.rows,
                    "key_blocks": () if keys is None else keys.tokens,
                    "key_rows": 1 if keys is None else keys.rows,
                },
            )
        if found.halo is not None:
            self.editor.read_neighbours(node, made.outputs[0], found.halo)  # type: ignore[arg-type]
            return
        for index, cut in made.outputs.items():
            value = node.outputs[index]
            if value.name:
                self.editor.set_cut(value, cut)  # type: ignore[arg-type]
        if made.partial:
            self.editor.add_up(node, found)


def _nested(node: ir.Node) -> Iterator[ir.Node]:
    for attribute in node.attributes.values():
        if not attribute.is_ref() and attribute.type is ir.AttributeType.GRAPH:
            yield from ir.traversal.RecursiveGraphIterator(attribute.as_graph())
