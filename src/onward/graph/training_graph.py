"""What is computed: the user's graph made ready for training, and the names that matter in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.adapters.adapted import AdaptedWeight
from onward.graph.adapters.passes import AddedAdapters, add_adapters
from onward.graph.classical.passes import rewrite_classical
from onward.graph.classical.rewriting import AttributeWeight, Rewritten
from onward.graph.classical.side_outputs import WhyNotLowered, leave_out_side_outputs, notes_on_side_outputs
from onward.graph.distillation.adding import PREFIX as TEACHER
from onward.graph.distillation.adding import distill, is_projection
from onward.graph.fusion import passes
from onward.graph.losses.adding import add_loss
from onward.graph.losses.preference import share_frozen
from onward.graph.losses.spec import LossNames, LossSpec
from onward.graph.nodes.budget import PreparationDeadline
from onward.graph.nodes.iteration import every_node
from onward.graph.ordered_names import OrderedNames
from onward.graph.quantize_aware.quantizers import NOTES, Quantizer, quantizers_of
from onward.graph.quantize_aware.scales import train_scales
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
from onward.graph.repair.segment_masks import compute_segment_masks
from onward.graph.repair.split_weights import Tie, notes_on_ties, tie_copies
from onward.graph.weights.branches import notes_on_branches
from onward.graph.weights.choice import ImmutableWeights, choose_weights, find_running_statistics
from onward.graph.weights.frozen_tensors import note_on_frozen, why_nothing_trains
from onward.graph.weights.lifted_tensors import note_on_lifted
from onward.graph.weights.names import WeightNames, weight_names
from onward.losses.registry import loss_named
from onward.parameters.adapter import Adapter
from onward.parameters.distillation import Distillation
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.parameters.training import DropoutRule


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
        unfused: what is of a known kind but was not fused, and why.
        known_as: module paths of the initializers, by which rules and messages may name them.
        attributes: weights that `source` stores as attributes of nodes; export writes them there.
        left_out: outputs of `source` that are not computed, each with the reason.
        constants: initializers that no rule makes trainable.
        adapters: frozen weights that have an adapter, whose tensors are among `weights`.
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
    unfused: tuple[str, ...] = ()
    known_as: WeightNames = field(default_factory=WeightNames)
    attributes: Mapping[str, AttributeWeight] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    rebatching: Rebatching | None = None
    constants: frozenset[str] = frozenset()
    adapters: Mapping[str, AdaptedWeight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", OrderedNames(self.weights))
        object.__setattr__(self, "states", OrderedNames(self.states))

    @property
    def loss(self) -> str | None:
        """The value that training minimizes, where a loss was added."""
        return None if self.loss_names is None else self.loss_names.loss or None

    @property
    def quantizers(self) -> tuple[Quantizer, ...]:
        """What quantization-aware training quantizes in `source`; empty without it."""
        return quantizers_of(self.source)

    @property
    def exported_weights(self) -> tuple[str, ...]:
        """The weights that `source` has a place for: all but the projections of distillation."""
        return tuple(name for name in self.weights if not is_projection(name))

    @property
    def exact_weights(self) -> frozenset[str]:
        """What mixed precision leaves as it is: a teacher's weights, and scales, weights and inputs of quantizing."""
        quantized = (name for one in self.quantizers for name in (one.value, one.scale))
        return frozenset((*quantized, *self.teacher_weights))

    @property
    def teacher_weights(self) -> frozenset[str]:
        """The initializers of the teacher of distillation; empty without one."""
        own = self.source.graph.initializers
        return frozenset(name for name in self.model.graph.initializers if name.startswith(TEACHER) and name not in own)

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
    distillation: Distillation | None = None,
    fuse: bool = False,
    fusions_off: Collection[str] = (),
    keep: Collection[str] = (),
    fixed_inputs: Mapping[str, float] | None = None,
    segment_masks: Mapping[str, str] | None = None,
    freeze_batch_norm: bool = False,
    why_not_lowered: WhyNotLowered | None = None,
    rebatch: bool = False,
    adapter: Adapter | None = None,
    seed: int = 0,
    limits: Limits = DEFAULT_LIMITS,
) -> TrainingGraph:
    """Reads a model and chooses what trains in it.

    Args:
        source: a path, a `ModelProto`, or an onnx-ir model.
        weights_to_train: exact names or `*`-patterns, of initializers or module paths; empty: all that can train.
        weights_not_to_train: exact names or patterns taken out again.
        tied_weights: patterns of initializers shared by several nodes that are to stay shared.
        untied_weights: patterns of initializers shared by several nodes that become one for each layer, and of those
            that are not tied to others by equal numbers alone.
        immutable_weights: operator -> (input index, value) of rank-0 constants that never train.
        revive_dropout: rules by which dropout that an export left out is put back, for training only.
        loss: what to minimize; None: only the model's own outputs.
        count_correct: with a class loss, also compute how many labels the prediction hits.
        distillation: what the model learns from a teacher besides; None: nothing.
        fuse: fuse several nodes into one where `onward.graph.fusion` knows how.
        fusions_off: fusions to leave out.
        keep: names of values and nodes that must stay as they are; text with a colon may hold several.
        fixed_inputs: input -> the number that fills it for every batch; the exported model keeps the input.
        segment_masks: attention mask among the inputs -> feature that it is computed from, a number per token.
        freeze_batch_norm: normalize by the running statistics in training, too, and leave them as they are.
        why_not_lowered: asked for every operator; what needs one that is not computed is left out of `model`.
        rebatch: compute any number of samples where the export fixed it; the exported model keeps its own.
        adapter: freeze all weights and train adapters next to them, where it has a rank.
        seed: of what adapters begin as.
        limits: what the model may ask of the machine.

    Raises:
        ModelError: the model cannot be read, a pattern matches nothing, or the loss does not fit the model.
        NotRebatched: asked for, and the model cannot compute another number of samples.
    """
    deadline, original = PreparationDeadline(limits), read_model(source, limits)
    untied = split_merged_weights(original, keep=tied_weights, split=untied_weights)
    read = (fixed_inputs or {}, segment_masks or {}, keep, why_not_lowered, limits)
    model, fills, fixed, left_out = _of_features(original, *read)
    ties, rows = tie_copies(model, untied, tied_weights, untied_weights)
    rewritten, rebatching = rewrite_classical(model), rebatch_graph(model) if rebatch else None
    revived = add_dropout(model, revive_dropout)
    names = _with_loss(model, loss, left_out, count_correct, distillation, why_not_lowered, seed)
    name_open_dimensions(model)
    constants = {**_known_constants(original, model, names, rewritten), **_fixed(model, fills, freeze_batch_norm)}
    states, known_as, roots = find_running_statistics(model.graph), weight_names(model.graph), _roots(model, names)
    asked, of_adapters = (weights_to_train, weights_not_to_train, immutable_weights, constants), (adapter, seed, roots)
    could_train, frozen, states = _choose(original, model, roots, states, (*asked, known_as))
    lost = (*notes_on_export(model, could_train, known_as), *_notes_on_source(original, could_train, loss))
    trained = _with_projections(add_adapters(model, could_train, frozen, known_as, *of_adapters), names)
    still = share_frozen(model.graph, (*trained.weights, *trained.changed), trained.frozen)
    fused = _fused(model, trained.weights, fusions_off, keep, deadline) if fuse else passes.Fused()
    weights = (*_notes_on_copies(ties, rows, trained), *_notes_on_weights(model.graph, trained, not weights_to_train))
    return TrainingGraph(
        source=original,
        model=model,
        weights=trained.weights,
        states=states,
        ties=ties,
        frozen=still,
        notes=(*untied.notes, *fixed, *revived, *lost, *weights, *_notes_on_ends(left_out, rewritten, names, fused)),
        loss_names=names,
        fusions=fused.done,
        unfused=fused.missed,
        known_as=trained.known_as,
        attributes=rewritten.weights,
        left_out=left_out,
        rebatching=rebatching,
        constants=frozenset(constants),
        adapters=trained.adapters,
    )


def _of_features(
    original: ir.Model,
    fixed_inputs: Mapping[str, float],
    segment_masks: Mapping[str, str],
    keep: Collection[str],
    why_not_lowered: WhyNotLowered | None,
    limits: Limits,
) -> tuple[ir.Model, tuple[str, ...], tuple[str, ...], Mapping[str, str]]:
    """The model as it is computed from features of data: constants for what is none, notes, and outputs left out."""
    model = prepare_for_lowering(original, limits)
    masks = compute_segment_masks(model, segment_masks)
    fills, notes = fix_inputs(model, fixed_inputs)
    left_out = leave_out_side_outputs(model, why_not_lowered)
    unpack_sequences(model, passes.names_in(model.graph, keep))
    return model, (*masks, *fills), notes, left_out


def _fused(
    model: ir.Model,
    weights: Collection[str],
    off: Collection[str],
    keep: Collection[str],
    deadline: PreparationDeadline,
) -> passes.Fused:
    fused = passes.fuse(model, weights, off, keep)
    deadline.check("the fused graph")
    return fused


def _with_loss(
    model: ir.Model,
    loss: LossSpec | None,
    left_out: Mapping[str, str],
    count_correct: bool,
    distillation: Distillation | None,
    why_not_lowered: WhyNotLowered | None,
    seed: int,
) -> LossNames | None:
    """Adds the loss to the graph, where there is one, and what a teacher adds to it."""
    _check_prediction(loss, left_out, model)
    if loss is None:
        return None
    names = add_loss(model, loss, count_correct=count_correct)
    if distillation is None or distillation.teacher_path is None:
        return names
    return distill(model, loss, names, distillation, why_not_lowered, seed)


def _choose(
    source: ir.Model, model: ir.Model, roots: Sequence[str], states: tuple[str, ...], asked: Sequence[Any]
) -> tuple[tuple[str, ...], dict[str, str], tuple[str, ...]]:
    """What trains, what does not and why, and running statistics; scales of quantization-aware training included."""
    chosen, frozen = choose_weights(model, roots, states, *asked)
    trained, averaged = train_scales(source, model)
    still = {
        name: reason for name, reason in frozen.items() if name not in (*trained, *averaged) and not is_projection(name)
    }
    others = (name for name in chosen if name not in averaged and not is_projection(name))
    return (*others, *trained), still, (*states, *averaged)


def _with_projections(trained: AddedAdapters, names: LossNames | None) -> AddedAdapters:
    return trained if names is None else replace(trained, weights=(*trained.weights, *names.projections))


def _roots(model: ir.Model, names: LossNames | None) -> list[str]:
    """What gradients are taken of: the loss, or else every output."""
    return [names.loss] if names is not None else [str(value.name) for value in model.graph.outputs]


def _fixed(model: ir.Model, fills: Collection[str], freeze_batch_norm: bool) -> dict[str, str]:
    """Initializers that stand for inputs, or that masks need, and running statistics that stay, with the reason."""
    statistics = freeze_running_statistics(model) if freeze_batch_norm else ()
    return dict.fromkeys(fills, FIXED_INPUT) | dict.fromkeys(statistics, FROZEN_STATISTIC)


def _notes_on_copies(ties: Mapping[str, Tie], of_one: Mapping[str, str], trained: AddedAdapters) -> tuple[str, ...]:
    weights = trained.weights
    notes = (note for name, note in of_one.items() if name in weights)
    return (*notes_on_ties(ties, weights, trained.known_as), *notes)


def _notes_on_weights(graph: ir.Graph, trained: AddedAdapters, are_all: bool) -> tuple[str, ...]:
    chosen, known_as = trained.weights, trained.known_as
    stored = {name: reason for name, reason in trained.frozen.items() if reason != FIXED_INPUT}
    is_open = bool(chosen) and are_all and not trained.adapters
    still = note_on_frozen(graph, chosen, stored, known_as) if is_open else ()
    return (*trained.notes, *note_on_lifted(chosen), *notes_on_branches(graph, chosen, known_as), *still)


def _notes_on_ends(
    left_out: Mapping[str, str], rewritten: Rewritten, names: LossNames | None, fused: passes.Fused
) -> tuple[str, ...]:
    of_loss = () if names is None else names.notes
    return (
        *notes_on_side_outputs(left_out),
        *rewritten.notes,
        *of_loss,
        *passes.notes_on_fusions(fused.done),
        *fused.missed,
    )


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


def _notes_on_source(source: ir.Model, chosen: tuple[str, ...], loss: LossSpec | None) -> tuple[str, ...]:
    sparse = notes_on_sparse_tensors(source.meta.get(SPARSE, {}), chosen)
    quantized: tuple[str, ...] = source.meta.get(NOTES, ())
    return (*sparse, *quantized, *_note_of_own_training(source), *_note_of_reduced_output(source, loss))


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
    computed = {str(value.name) for node in every_node(source.graph) for value in node.outputs}
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
