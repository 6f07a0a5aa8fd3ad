"""What is computed: the user's graph made ready for training, and the names that matter in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.classical.passes import rewrite_classical
from onward.graph.classical.rewriting import AttributeWeight, Rewritten
from onward.graph.classical.side_outputs import WhyNotLowered, leave_out_side_outputs, notes_on_side_outputs
from onward.graph.fusion import passes
from onward.graph.losses.adding import add_loss
from onward.graph.losses.spec import LossNames, LossSpec
from onward.graph.nodes.budget import Deadline
from onward.graph.reading.dimensions import name_open_dimensions
from onward.graph.reading.garbage_collection import without_collection
from onward.graph.reading.model_file import TRAINING_INFO, ModelSource, prepare_for_lowering, read_model
from onward.graph.reading.sequences import unpack_sequences
from onward.graph.reading.sparse_tensors import SPARSE, notes_on_sparse_tensors
from onward.graph.rebatching.passes import Rebatching, rebatch_graph
from onward.graph.repair.dropout import add_dropout
from onward.graph.repair.export_notes import notes_on_export
from onward.graph.repair.fixed_inputs import FIXED_INPUT, fix_inputs
from onward.graph.repair.frozen_statistics import FROZEN_STATISTIC, freeze_running_statistics
from onward.graph.repair.merged_weights import split_merged_weights
from onward.graph.repair.split_weights import Tie, notes_on_ties, tie_copies
from onward.graph.weights.branches import notes_on_branches
from onward.graph.weights.choice import ImmutableWeights, choose_weights, find_running_statistics
from onward.graph.weights.frozen_tensors import note_on_frozen, why_nothing_trains
from onward.graph.weights.lifted_tensors import note_on_lifted
from onward.graph.weights.names import WeightNames, weight_names
from onward.losses.registry import loss_named
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.parameters.training import DropoutRule

WeightPattern = str | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class TrainingGraph:
    """The graph to train and its names; a weight's identity is its ONNX initializer name.

    Attributes:
        source: the user's own graph, which export writes back; only merged weights are untied in it.
        model: what is computed: functions inlined, constants lifted, later the loss added.
        weights: initializers that train, in the order of the graph.
        states: running statistics of batch normalization, updated by forward passes in training mode.
        ties: initializers of `source` that repeat a weight, transposed or broadcast; export writes them from it.
        frozen: float initializers and quantized weights that do not train, each with the reason.
        notes: what was changed on the way, one sentence each, for the user.
        loss_names: what training minimizes and the labels it reads, once a loss was added.
        fusions: nodes of `model` that stand for several of the user's.
        known_as: module paths of the initializers, by which rules and messages may name them.
        attributes: weights that `source` stores as attributes of nodes; export writes them there.
        left_out: outputs of `source` that are not computed, each with the reason.
        constants: initializers that no rule makes trainable.
        rebatching: how `model` came to compute any number of samples, where the export fixed it.
    """

    source: ir.Model
    model: ir.Model
    weights: tuple[str, ...]
    states: tuple[str, ...]
    ties: Mapping[str, Tie]
    frozen: Mapping[str, str]
    notes: tuple[str, ...]
    loss_names: LossNames | None = None
    fusions: tuple[passes.Fusion, ...] = ()
    known_as: WeightNames = field(default_factory=WeightNames)
    attributes: Mapping[str, AttributeWeight] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    rebatching: Rebatching | None = None
    constants: frozenset[str] = frozenset()

    @property
    def loss(self) -> str | None:
        """The value that training minimizes, where a loss was added."""
        return None if self.loss_names is None else self.loss_names.loss or None

    def why_nothing_trains(self) -> str:
        """What to report to a user of a graph without weights: what its tensors are, and what to do."""
        return why_nothing_trains(self.model.graph, self.frozen, self.known_as, self.constants)


@without_collection
def make_training_graph(
    source: ModelSource,
    *,
    weights_to_train: Sequence[str] = (),
    weights_not_to_train: Sequence[str] = (),
    tied_weights: Sequence[str] = (),
    untied_weights: Sequence[str] = (),
    immutable_weights: ImmutableWeights | None = None,
    revive_dropout: Sequence[DropoutRule] = (),
    loss: LossSpec | None = None,
    count_correct: bool = False,
    fuse: bool = False,
    fusions_off: Collection[str] = (),
    keep: Collection[str] = (),
    fixed_inputs: Mapping[str, float] | None = None,
    freeze_batch_norm: bool = False,
    why_not_lowered: WhyNotLowered | None = None,
    rebatch: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> TrainingGraph:
    """Reads a model and chooses what trains in it.

    Args:
        source: a path, a `ModelProto`, or an onnx-ir model.
        weights_to_train: exact names or `*`-patterns, of initializers or module paths; empty: all that can train.
        weights_not_to_train: exact names or patterns taken out again.
        tied_weights: patterns of initializers shared by several nodes that are to stay shared.
        untied_weights: patterns of initializers shared by several nodes that become one for each layer.
        immutable_weights: operator -> (input index, value) of rank-0 constants that never train.
        revive_dropout: rules by which dropout that an export left out is put back, for training only.
        loss: what to minimize; None: only the model's own outputs.
        count_correct: with a class loss, also compute how many labels the prediction hits.
        fuse: fuse several nodes into one where `onward.graph.fusion` knows how.
        fusions_off: fusions to leave out.
        keep: names of values and nodes that must stay as they are; text with a colon may hold several.
        fixed_inputs: input -> the number that fills it for every batch; the exported model keeps the input.
        freeze_batch_norm: normalize by the running statistics in training, too, and leave them as they are.
        why_not_lowered: asked for every operator; what needs one that is not computed is left out of `model`.
        rebatch: compute any number of samples where the export fixed it; the exported model keeps its own.
        limits: what the model may ask of the machine.

    Raises:
        ModelError: the model cannot be read, a pattern matches nothing, or the loss does not fit the model.
        NotRebatched: asked for, and the model cannot compute another number of samples.
    """
    deadline, original = Deadline(limits), read_model(source, limits)
    untied = split_merged_weights(original, keep=tied_weights, split=untied_weights)
    model = prepare_for_lowering(original, limits)
    fills, fixed = fix_inputs(model, fixed_inputs or {})
    left_out = leave_out_side_outputs(model, why_not_lowered)
    unpack_sequences(model, passes.names_in(model.graph, keep))
    ties, rows = tie_copies(model, untied.families, tied_weights)
    rewritten, rebatching = rewrite_classical(model), rebatch_graph(model) if rebatch else None
    revived = add_dropout(model, revive_dropout)
    names = _with_loss(model, loss, left_out, count_correct)
    name_open_dimensions(model)
    constants = _known_constants(original, model, names, rewritten) | dict.fromkeys(fills, FIXED_INPUT)
    constants |= dict.fromkeys(freeze_running_statistics(model) if freeze_batch_norm else (), FROZEN_STATISTIC)
    states, known_as = find_running_statistics(model.graph), weight_names(model.graph)
    asked = (weights_to_train, weights_not_to_train, immutable_weights, constants, known_as)
    chosen, frozen = choose_weights(model, _roots(model, names), states, *asked)
    lost = (*notes_on_export(model, chosen, known_as), *_notes_on_source(original, chosen))
    fusions = passes.fuse(model, chosen, fusions_off, keep) if fuse else ()
    deadline.check("the fused graph")
    tied = (*notes_on_ties(ties, chosen, known_as), *(note for name, note in rows.items() if name in chosen))
    ends = (*_notes_on_ends(left_out, rewritten, names), *_note_of_reduced_output(original, loss))
    chosen_notes = _notes_on_weights(model.graph, chosen, frozen, known_as, bool(weights_to_train))
    notes = (*untied.notes, *fixed, *tied, *revived, *lost, *chosen_notes, *ends, *passes.notes_on_fusions(fusions))
    return TrainingGraph(
        source=original,
        model=model,
        weights=chosen,
        states=states,
        ties=ties,
        frozen=frozen,
        notes=notes,
        loss_names=names,
        fusions=fusions,
        known_as=known_as,
        attributes=rewritten.weights,
        left_out=left_out,
        rebatching=rebatching,
        constants=frozenset(constants),
    )


def _with_loss(
    model: ir.Model, loss: LossSpec | None, left_out: Mapping[str, str], count_correct: bool
) -> LossNames | None:
    """Adds the loss to the graph, where there is one."""
    _check_prediction(loss, left_out, model)
    return None if loss is None else add_loss(model, loss, count_correct=count_correct)


def _roots(model: ir.Model, names: LossNames | None) -> list[str]:
    """What gradients are taken of: the loss, or else every output."""
    return [names.loss] if names is not None else [str(value.name) for value in model.graph.outputs]


def _notes_on_weights(
    graph: ir.Graph, chosen: tuple[str, ...], frozen: Mapping[str, str], known_as: WeightNames, are_asked_for: bool
) -> tuple[str, ...]:
    stored = {name: reason for name, reason in frozen.items() if reason != FIXED_INPUT}
    still = () if not chosen or are_asked_for else note_on_frozen(graph, chosen, stored, known_as)
    return (*note_on_lifted(chosen), *notes_on_branches(graph, chosen, known_as), *still)


def _notes_on_ends(left_out: Mapping[str, str], rewritten: Rewritten, names: LossNames | None) -> tuple[str, ...]:
    return (*notes_on_side_outputs(left_out), *rewritten.notes, *(() if names is None else names.notes))


def _check_prediction(loss: LossSpec | None, left_out: Mapping[str, str], model: ir.Model) -> None:
    """A loss of an output that is not computed."""
    if loss is None:
        return
    for name in (getattr(loss, port) for port in loss_named(loss.type).predictions or ("prediction",)):
        if name is not None and name in left_out:
            others = ", ".join(repr(str(value.name)) for value in model.graph.outputs)
            raise ModelError(
                f"loss.prediction is {name!r}, which cannot be computed: {left_out[name]}. Set it to one of the "
                f"outputs that can: {others}."
            )


def _note_of_reduced_output(source: ir.Model, loss: LossSpec | None) -> tuple[str, ...]:
    """An output that is more than one number may be a loss of each sample, or not a loss at all."""
    if loss is None or not loss_named(loss.type).is_an_output:
        return ()
    shapes = {value.name: tuple(value.shape or ()) for value in source.graph.outputs}
    shape = shapes.get(loss.prediction, ())
    if all(size == 1 for size in shape):
        return ()
    return (
        f"loss.type is {loss.type!r}, and {loss.prediction!r} has shape [{', '.join(map(str, shape))}]: the "
        f"{loss.reduction} of its numbers is minimized. If they are predictions, choose a type that compares them "
        "with a label.",
    )


def _notes_on_source(source: ir.Model, chosen: tuple[str, ...]) -> tuple[str, ...]:
    return (*notes_on_sparse_tensors(source.meta.get(SPARSE, {}), chosen), *_note_of_own_training(source))


def _note_of_own_training(source: ir.Model) -> tuple[str, ...]:
    if not source.meta.get(TRAINING_INFO):
        return ()
    return (
        "the model has its own training_info; export keeps it unchanged. It is not what RUN.yaml "
        "trains with: onward.lowering.training_info.load_training_info runs it.",
    )


def _known_constants(source: ir.Model, model: ir.Model, loss: LossNames | None, rewritten: Rewritten) -> dict[str, str]:
    """Initializers of the prepared model that are no weights whatever they look like, with the reason."""
    reasons = dict.fromkeys(() if loss is None else loss.constants, "a constant of the loss")
    reasons.update(rewritten.constants)
    stored: Counter[str] = Counter()
    computed = {str(value.name) for node in ir.traversal.RecursiveGraphIterator(source.graph) for value in node.outputs}
    stored.update(name for name, found in rewritten.weights.items() if found.output in computed)
    for graph in (source.graph, *source.graph.subgraphs()):
        stored.update(str(name) for name in graph.initializers)
        for node in graph:
            if node.op_type in ("Constant", "ConstantOfShape") and node.domain == "":
                name = str(node.outputs[0].name)
                stored[name] += 1
                if node.op_type == "Constant" and source.producer_name == "pytorch":
                    reasons[name] = "a Constant node of torch's exporter"
    for name in model.graph.initializers:
        if name not in stored:
            reasons.setdefault(name, "a constant inside of an ONNX function")
        elif stored[name] > 1:
            reasons.setdefault(name, "its name stands for several tensors of nested graphs")
    return reasons


def outputs_of(graph: TrainingGraph) -> tuple[str, ...]:
    """The outputs of the user's model that are computed, in its order."""
    computed = {value.name for value in graph.model.graph.outputs}
    return tuple(str(value.name) for value in graph.source.graph.outputs if value.name in computed)
