"""From parameters to the parts of a run: the graph with its loss, the schedule, the loss scale, the metrics."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from onward.data.loader import DataLoader
from onward.data.shard import FeatureSpec
from onward.engine.building.graph_costs import known_costs
from onward.engine.building.sequences import plan_sequences
from onward.engine.building.sizes import input_sizes, known_dimensions
from onward.engine.inputs.bag_starts import refuse_bag_starts
from onward.engine.inputs.index_ranges import FeatureRange, index_ranges
from onward.engine.reports import RunStart
from onward.engine.state import Counters, TrainState
from onward.engine.steps import WatchedNames
from onward.errors import ParametersError, StorageError
from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossNames, LossSpec
from onward.graph.new_head import NewHead, with_new_head
from onward.graph.quantize_aware.inserting import quantize_aware_model
from onward.graph.reading.model_file import ModelSource
from onward.graph.rebatching.passes import NotRebatched, fixed_batch_size
from onward.graph.training_graph import TrainingGraph, make_training_graph, outputs_of
from onward.losses.labels import LabelRange
from onward.losses.registry import loss_named
from onward.lowering.building.shapes import ValueFacts, find_value_facts
from onward.lowering.inspection import why_not_lowered
from onward.lowering.module import input_types
from onward.lowering.rebatching_proof import prove_rebatching
from onward.optim.loss_scale import LossScale
from onward.parallel import context as _context  # noqa: F401  its operators register themselves
from onward.parallel.launch.process import Mesh
from onward.parameters import Loss, Parameters, TensorBoard, Training
from onward.plan.context.cutting import ContextPlan
from onward.plan.costs.costs import measure_costs
from onward.plan.decision import Plan, make_plan
from onward.plan.experts import plan_experts
from onward.plan.layers import find_layers, note_on_train_last
from onward.plan.pipeline.joined_models import join_stage_models
from onward.plan.topology import Topology
from onward.remote.files import is_folder
from onward.spelling import listed

SEED_STRIDE = 1_000_003
"""Between the seeds of processes that see other samples or other layers: far apart, and none for the first."""


def model_to_train(parameters: Parameters) -> ModelSource:
    """The file of the model, or what its stages are when they are joined."""
    files = parameters.model_files
    return join_stage_models(files, parameters.limits) if parameters.distributed.pipeline_stage_paths else files[0]


def check_experts(parameters: Parameters) -> None:
    """Refuses expert parallelism of a model without experts before any process is started.

    Raises:
        UserError: what it was looked for, or why the model cannot be read.
    """
    asked = parameters.distributed.expert_parallel_size > 1 or parameters.distributed.expert_capacity_factor is not None
    if asked and all(os.path.isfile(file) for file in parameters.model_files):  # remote ones come with the ranks
        plan_experts(read_training_graph(parameters), parameters.distributed)


def read_training_graph(
    parameters: Parameters, source: ModelSource | None = None, choose: bool = True
) -> TrainingGraph:
    """Reads a model, adds the loss, and chooses the weights to train (all that can, where `choose` is false).

    Args:
        parameters: of the run.
        source: the model; None: the one that the run trains.
        choose: as `training.weights_to_train` and `weights_not_to_train` say.
    """
    training, speed, board, split = (
        parameters.training,
        parameters.speed,
        parameters.tensorboard,
        parameters.distributed,
    )
    cuts = split.pipeline_partition_cut_list or ()
    off = speed.fusions_off
    if split.horizontal_parallel_size > 1:
        off = (*off, "cross_entropy")  # the loss is cut by classes instead: logits are sharded anyway
    named = (*board.scalar_names, *board.histogram_names, *board.norm_names, *split.op_id_to_stage)
    model = model_to_train(parameters) if source is None else source
    model, head = with_new_head(
        model, parameters.loss.prediction, parameters.head.num_classes, training.seed, parameters.limits
    )
    model = quantize_aware_model(model, parameters.quantize_aware, parameters.limits)
    read = partial(
        make_training_graph,
        model,
        weights_to_train=training.weights_to_train if choose else (),
        weights_not_to_train=training.weights_not_to_train if choose else (),
        tied_weights=training.tied_weights,
        untied_weights=training.untied_weights,
        immutable_weights=training.immutable_weights,
        revive_dropout=training.revive_dropout,
        freeze_batch_norm=training.freeze_batch_norm,
        loss=None if loss_named(parameters.loss.type).add is None else loss_spec(parameters),
        count_correct=True,
        distillation=parameters.distillation,
        fuse=speed.fuse,
        fusions_off=off,
        fixed_inputs=parameters.data.fixed_inputs,
        segment_masks=parameters.data.segment_masks,
        keep=(*named, *((cuts,) if isinstance(cuts, str) else cuts)),
        why_not_lowered=why_not_lowered,
        adapter=parameters.adapter,
        seed=training.seed,
        limits=parameters.limits,
    )
    graph, told = read(), [] if head is None else [head.note]
    if choose and training.train_last is not None:
        left_out = find_layers(graph).before_last_blocks(training.train_last)
        told.append(note_on_train_last(training.train_last, graph, left_out))
        read = partial(read, weights_not_to_train=(*training.weights_not_to_train, *left_out))
        graph = read()
    sizes = {training.batch_size, training.eval_batch_size or training.batch_size}
    fixed = fixed_batch_size(graph.source.graph)
    if fixed is not None and sizes != {fixed}:
        told.append(_prove_rebatching(parameters, model, fixed))
        graph = read(rebatch=True)
    if head is not None:
        _refuse_untrained_head(head, graph)
    graph = dataclasses.replace(graph, notes=(*told, *graph.notes))
    if graph.loss_names is None:
        graph = dataclasses.replace(graph, loss_names=LossNames(loss="", outputs=outputs_of(graph)))
    return graph


def _refuse_untrained_head(head: NewHead, graph: TrainingGraph) -> None:
    still = [name for name in head.names if name not in graph.weights]
    if still:
        raise ParametersError(
            f"head.num_classes gives {listed([repr(name) for name in still])} new values, but they are not trained. "
            "Add them to adapter.train_too or training.weights_to_train, or take them out of weights_not_to_train."
        )


def _prove_rebatching(parameters: Parameters, model: ModelSource, fixed: int) -> str:
    """What to report of a model whose batch size is another than its export fixed.

    Raises:
        ParametersError: the model cannot compute other numbers of samples.
    """
    training = parameters.training
    try:
        difference = prove_rebatching(model, parameters.data.fixed_inputs, parameters.limits)
    except NotRebatched as error:
        steps = training.gradient_accumulation_steps * -(-training.batch_size // fixed)
        raise ParametersError(
            f"training.batch_size is {training.batch_size}, but the batch size in the model is fixed to {fixed}, "
            f"and the graph cannot be rewritten for another, because {error}. Set training.batch_size and "
            f"training.eval_batch_size to {fixed} and training.gradient_accumulation_steps to {steps}, which makes the "
            "same updates, or export the model with a dynamic batch axis (dynamic_shapes of torch.onnx.export)."
        ) from error
    return (
        f"the batch size in the model is fixed to {fixed}; for training the graph was rewritten for any batch size. "
        f"Samples computed as one batch and one by one differ by {difference:.0e} of the largest output. The exported "
        "model keeps its batch size."
    )


def write_loss_model(parameters: Parameters, rank: int) -> None:
    """The model with its loss, as a file of rank 0, where `paths.model_with_loss_func_path` asks for it.

    Ranks may share the folder, and would take the unfinished file from each other.
    """
    path = parameters.paths.model_with_loss_func_path
    if path is not None and rank == 0:
        write_model_with_loss(model_to_train(parameters), loss_spec(parameters), path)


def loss_spec(parameters: Parameters) -> LossSpec:
    """The section `loss` as the graph wants it."""
    return LossSpec(**vars(parameters.loss), limits=parameters.limits)


def label_ranges(loss: Loss, graph: TrainingGraph) -> dict[str, LabelRange]:
    """Features that are class labels, with their classes, where the model fixes how many there are."""
    classes = {} if graph.loss_names is None else graph.loss_names.classes
    kind = loss_named(loss.type)
    return {label: kind.label_range(loss, label, count) for label, count in classes.items()}


def feature_ranges(loss: Loss, graph: TrainingGraph) -> dict[str, FeatureRange]:
    """Features that are class labels or pick rows of tables -> which numbers they may hold."""
    labels = () if graph.loss_names is None else graph.loss_names.labels
    rows = {name: rows for name, rows in index_ranges(graph.model).items() if name not in labels}
    return {**rows, **label_ranges(loss, graph)}


def watched_names(board: TensorBoard, graph: TrainingGraph) -> WatchedNames:
    """Which tensors reports are to hold.

    Raises:
        ParametersError: a name is neither a value of the graph, nor a weight, nor the gradient of one.
    """
    asked = tuple(dict.fromkeys((*board.scalar_names, *board.histogram_names, *board.norm_names)))
    values = {str(output.name) for node in graph.model.graph for output in node.outputs}
    weights = graph.known_as.everything(graph.weights)
    known = {*weights, *(f"{name}_grad" for name in weights), *values}
    unknown = [name for name in asked if "*" not in name and name not in known]
    if unknown:
        raise ParametersError(
            f"tensorboard names {', '.join(map(repr, unknown))}: neither a value of the graph, nor a weight, "
            "nor the gradient of one (`<weight>_grad`)."
        )
    return WatchedNames(asked, tuple(name for name in asked if name in values), graph.known_as)


def check_dimensions(mapped: Mapping[str, int], graph: TrainingGraph) -> None:
    """Checks that mapped dimensions name symbolic dimensions of the model's inputs.

    Raises:
        ParametersError: one does not.
    """
    _, shapes = input_types(graph)
    symbols = {size for shape in shapes.values() for size in shape if isinstance(size, str)}
    for name in mapped:
        if name not in symbols:
            listed = ", ".join(sorted(symbols)) or "none"
            raise ParametersError(
                f"mapped_dimensions names {name!r}; the symbolic dimensions of the model's inputs are: {listed}."
            )


def check_step(training: Training, begin: Counters) -> str | None:
    """Checks that a round that is resumed is not between two updates; what to report of another accumulation.

    Raises:
        ParametersError: the accumulation was changed to a number of steps that does not divide the steps done.
    """
    accumulation = training.gradient_accumulation_steps
    if begin.step % accumulation:
        raise ParametersError(
            f"training.gradient_accumulation_steps is {accumulation}, but the run resumes from step {begin.step}, "
            "which is not a multiple of it. Set the number that the run began with, or change it at the end of a round."
        )
    if begin.round or not begin.update or begin.step % begin.update or begin.step == begin.update * accumulation:
        return None
    before, total = begin.step // begin.update, begin.update + (training.steps - begin.step) // accumulation
    asked = training.steps // before
    return (
        f"training.gradient_accumulation_steps is {accumulation}, and was {before} up to step {begin.step}: the "
        f"{training.steps} steps of training.num_train_steps now make {total} updates instead of {asked}. To make "
        f"{asked}, set it to {begin.step + (asked - begin.update) * accumulation}, or training.num_updates to {asked}."
    )


def present_feature_specs(parameters: Parameters) -> Mapping[str, FeatureSpec]:
    """What the samples of the training data have, where the data are there already."""
    folder, data = parameters.paths.train_data_dir, parameters.data
    if folder is None or not is_folder(folder):
        return {}
    loader = DataLoader(data.input_name_map, folder, 1, 0, 1, last_batch=data.last_batch)
    try:
        return loader.feature_specs()
    finally:
        loader.close()


def plan_run(
    parameters: Parameters, topology: Topology, graph: TrainingGraph, specs: Mapping[str, FeatureSpec]
) -> Plan:
    """Who does what in a run; sizes of the graph's values are looked up only where it is to be cut.

    Args:
        parameters: of the run.
        topology: the mesh.
        graph: of the entire network, with its loss.
        specs: what the data's samples have, where it is known.

    Raises:
        ParametersError: no weight trains, nothing can be cut as asked, or a size that a plan needs is not known.
        ModelError: the model reads where bags of ids begin.
    """
    if not graph.weights:
        raise ParametersError(graph.why_nothing_trains())
    refuse_bag_starts(graph.model)
    facts, sizes = ValueFacts({}, {}), dict[str, int]()
    by_budget = parameters.recompute.memory_budget is not None
    if topology.horizontal_size * topology.pipeline_size * topology.context_size > 1 or by_budget:
        sizes = known_dimensions(parameters.training, graph, specs)
    context, local = ContextPlan(), graph
    if topology.context_size > 1:
        context = plan_sequences(graph, topology.context_size, sizes, parameters.training.batch_size)[0]
        local = context.of(graph)
        still_open = {size for shape in input_types(local)[1].values() for size in shape}
        sizes = {name: size for name, size in sizes.items() if name in still_open}
    if topology.horizontal_size > 1:
        facts = find_value_facts(local, input_sizes(local, sizes))
    named = {size for shape in input_types(local)[1].values() for size in shape if isinstance(size, str)}
    # Sizes that nobody knows yet count as `DEFAULT_SIZE`, which balances stages well enough.
    count = partial(known_costs if named <= set(sizes) else measure_costs, local, sizes, shapes=facts.shapes)
    return make_plan(parameters, topology, local, facts.shapes, facts.numbers, count, context)


def seed_random(seed: int, mesh: Mesh) -> None:
    """Seeds torch; processes that see other samples or other layers draw other random numbers."""
    stream = mesh.place.pipeline * mesh.topology.reader_count + mesh.reader
    torch.manual_seed(seed + stream * SEED_STRIDE)


def run_start(training: Training, state: TrainState) -> RunStart:
    """What watchers are notified of when a round begins."""
    counters = state.counters
    return RunStart(
        round=counters.round,
        step=counters.step,
        num_train_steps=training.steps,
        update=counters.update,
        batch_size=training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        replicas=state.mesh.topology.reader_count,
    )


def make_loss_scale(parameters: Parameters) -> LossScale | None:
    """The loss scale a run begins with; None in bf16 and fp32, which need none."""
    precision = parameters.mixed_precision
    if not precision.use_mixed_precision or precision.use_bfloat16:
        return None
    return LossScale.of_parameter(precision.loss_scale)


def make_folders(parameters: Parameters) -> None:
    """Makes the folders that a run writes to at its end.

    Raises:
        StorageError: one cannot be made.
    """
    if parameters.paths.output_dir is not None:
        make_folder(parameters.paths.output_dir, "paths.output_dir")
    if parameters.profiler.trace_dir is not None:
        make_folder(parameters.profiler.trace_dir, "profiler.trace_dir")


def make_folder(folder: Path, field: str) -> None:
    """Makes a folder that a field of the parameters names.

    Raises:
        StorageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{field}: {str(folder)!r} cannot be made: {error.strerror}. Name another folder."
        ) from error
