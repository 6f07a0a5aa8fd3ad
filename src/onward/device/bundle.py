"""`onward device`: a folder that any ONNX Runtime trains with, its weights written once for all graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx_ir.passes import common as passes

from onward.artifacts.run_graphs import load_checkpoint
from onward.artifacts.scalar_ranks import align_scalars
from onward.artifacts.zero_biases import drop_zero_biases
from onward.checkpoint.reading import find_checkpoint, note_on_taken
from onward.device.bundle_files import save_bundle
from onward.device.compact_graphs import drop_descriptions, shorten_names, write_uniform_constants_once
from onward.device.inference_graphs import evaluation_graph, inference_graph
from onward.device.layout import DeviceGraphs
from onward.device.loss_parts import means_of, with_selector
from onward.device.loss_scaling import with_loss_scale
from onward.device.run_fields import RUN_FIELDS, write_fields
from onward.device.step_graphs import step_graphs
from onward.engine.building.preparation import (
    check_dimensions,
    feature_ranges,
    make_loss_scale,
    read_training_graph,
)
from onward.engine.inputs.epochs import count_in_steps
from onward.errors import ParametersError
from onward.graph.adapters.base_checksum import base_checksum
from onward.graph.training_graph import TrainingGraph
from onward.losses.registry import loss_named
from onward.lowering.module import OnnxModule
from onward.optim.building import with_exact_names
from onward.optim.loss_scale import LossScale
from onward.optimizers.registry import optimizer_named
from onward.parameters import Parameters


def write_bundle(
    run: str | Path,
    folder: str | Path,
    *,
    checkpoint: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    weights_inside: bool = False,
    notify: Callable[[str], None] = lambda message: None,
) -> Path:
    """Writes the device bundle of a run.

    Args:
        run: the RUN.yaml.
        folder: where it goes; it must not exist, or hold a bundle, which is replaced.
        checkpoint: whose weights and running statistics it begins with; None: those of the model.
        overrides: fields of the run.
        weights_inside: as of `save_bundle`.
        notify: takes what the user should know, one sentence a call.

    Returns:
        The folder.

    Raises:
        CheckpointError: no complete checkpoint, or one of another model.
        ModelError: the model cannot be written in standard operators.
        ParametersError: a field asks for what a bundle cannot do, with its name.
        StorageError: a file cannot be written.
    """
    parameters = count_in_steps(Parameters.load(run, overrides), 1, notify)
    why = why_no_bundle(parameters)
    if why:
        raise ParametersError(f"no device bundle can be written of this run: {why}")
    asked = None if checkpoint is None else Path(checkpoint)
    taken = None if asked is None else find_checkpoint(asked)
    graphs = device_graphs(parameters, taken)
    of_checkpoint = "" if asked is None or taken is None else note_on_taken(asked, taken)
    for note in filter(None, (*graphs.notes, of_checkpoint)):
        notify(note)
    return save_bundle(graphs, Path(folder), weights_inside=weights_inside)


def why_no_bundle(parameters: Parameters) -> str:
    """The first field whose meaning a device bundle cannot have, and what to do; "" where there is none."""
    loss, training = loss_named(parameters.loss.type), parameters.training
    told = {
        f"loss.type is {loss.name}, which is computed outside of the graph. Choose another loss.": (
            loss.add is None or not loss.has_operators
        ),
        f"averaging.kind is {parameters.averaging.kind}. Remove averaging.": parameters.averaging.kind is not None,
        f"pruning.pattern is {parameters.pruning.pattern}. Remove pruning.": parameters.pruning.pattern is not None,
        "training.unfreeze freezes weights for a time. Remove it, or set training.weights_not_to_train.": bool(
            training.unfreeze
        ),
        f"frozen_weights.dtype is {parameters.frozen_weights.dtype}. Set it to as_stored.": (
            parameters.frozen_weights.dtype != "as_stored"
        ),
        "the section quantize_aware is set. Remove it, and quantize the trained model.": (
            parameters.quantize_aware != type(parameters.quantize_aware)()
        ),
        f"there are {len(parameters.next_rounds)} next_rounds, and a bundle holds one round. Remove them.": bool(
            parameters.next_rounds
        ),
        "training.is_perf_test is true. Set it to false.": training.is_perf_test,
    }
    return next((text for text, holds in told.items() if holds), "")


def device_graphs(parameters: Parameters, checkpoint: Path | None = None) -> DeviceGraphs:
    """The graphs of a run's bundle, and what a device keeps.

    Raises:
        CheckpointError, ModelError, ParametersError: as `write_bundle` does.
    """
    graph = read_training_graph(parameters)
    plain = read_training_graph(replace(parameters, speed=replace(parameters.speed, fuse=False)))
    if not graph.weights:
        raise ParametersError(graph.why_nothing_trains())
    check_dimensions(parameters.training.mapped_dimensions, graph)
    rules = with_exact_names(parameters.optimizer, graph)
    averages = optimizer_named(rules.training_optimizer_name).averages_weights
    evaluated, metrics = evaluation_graph(plain, parameters.loss, averages)
    traced = with_selector(graph) if len(means_of(graph, parameters)) > 1 else graph
    scale = make_loss_scale(parameters) if _computes_in_fp16(parameters, graph) else None
    if scale is not None:
        traced = with_loss_scale(traced)
    assert traced.loss is not None
    net = OnnxModule(traced, (traced.loss,))
    if checkpoint is not None:
        load_checkpoint(net, checkpoint)
    steps, state = step_graphs(net, parameters, rules, scale)
    models = {**steps, "eval": evaluated, "infer": inference_graph(plain, averages)}
    for model in models.values():
        align_scalars(model)
        passes.DeduplicateInitializersPass()(model)
        passes.RemoveUnusedNodesPass()(model)
        drop_descriptions(model)
        drop_zero_biases(model)
        write_uniform_constants_once(model)
    for name in steps:
        shorten_names(models[name])
    labels = () if graph.loss_names is None else graph.loss_names.labels
    return DeviceGraphs(
        models=models,
        state=tuple(state),
        metrics=metrics,
        labels=tuple(labels),
        feature_ranges=feature_ranges(parameters.loss, graph),
        notes=_notes(parameters, graph),
        about={
            "training": _training(parameters, scale),
            "model": _model(parameters, graph),
            RUN_FIELDS: write_fields(parameters),
        },
    )


def _computes_in_fp16(parameters: Parameters, graph: TrainingGraph) -> bool:
    """Whether steps have mixed precision: that of fp16, which ONNX Runtime computes everywhere."""
    asked = parameters.mixed_precision
    return (
        asked.use_mixed_precision is True and not asked.use_bfloat16 and not asked.float8 and not graph.teacher_weights
    )


def _notes(parameters: Parameters, graph: TrainingGraph) -> tuple[str, ...]:
    notes, precision = list(graph.notes), parameters.mixed_precision
    if parameters.training.metrics:
        notes.append("training.metrics are computed by torchmetrics; the bundle evaluates the loss and accuracy alone.")
    if _computes_in_fp16(parameters, graph):
        notes.append(
            "mixed_precision: steps compute in fp16 with fp32 master weights and a loss scale; eval.onnx and "
            "infer.onnx compute in the model's own types."
        )
    elif precision.use_mixed_precision or precision.float8:
        notes.append(_why_not_mixed(parameters, graph))
    notes += _only_in_training_runs(parameters)
    if parameters.augmentation.feature is not None:
        notes.append("the section augmentation changes batches of `onward train`; on a device, augment them yourself.")
    if parameters.distributed != type(parameters.distributed)():
        notes.append(
            "a device trains alone: the section distributed is ignored, and an update has training.batch_size * "
            "gradient_accumulation_steps samples."
        )
    return tuple(notes)


def _why_not_mixed(parameters: Parameters, graph: TrainingGraph) -> str:
    asked, has_teacher = parameters.mixed_precision, bool(graph.teacher_weights)
    no_types = "ONNX Runtime computes neither bf16 nor FP8 on every device"
    reasons = [
        *(["auto chooses by the machine that trains"] * (asked.use_mixed_precision == "auto")),
        *([no_types] * (asked.use_bfloat16 or asked.float8)),
        *(["a teacher keeps its types"] * has_teacher),
    ]
    hint = "" if has_teacher else " Set use_mixed_precision alone for fp16."
    return (
        f"mixed_precision is for `onward train` here: {' and '.join(reasons)}. The bundle computes in the model's own "
        f"types.{hint}"
    )


def _only_in_training_runs(parameters: Parameters) -> list[str]:
    """Notes on what decides by evaluations or past losses: on a device that is for the program that trains."""
    checkpoint, notes = parameters.checkpoint, []
    by_evaluations = [
        *(["the section early_stopping"] * (parameters.early_stopping != type(parameters.early_stopping)())),
        *(["checkpoint.keep_best"] * checkpoint.keep_best),
        *(["checkpoint.export: best"] * (checkpoint.export == "best")),
    ]
    if by_evaluations:
        notes.append(
            f"left out of the bundle: {', '.join(by_evaluations)}, which read evaluations of `onward train`. On a "
            "device the program that trains calls evaluate, saves the state where it is the best, and decides when to "
            "stop."
        )
    if parameters.on_bad_loss.spike_threshold is not None:
        notes.append(
            "left out of the bundle: on_bad_loss.spike_threshold, which returns to checkpoints of `onward train`. On a "
            "device, save the state from time to time, and load it after a spike."
        )
    return notes


def _training(parameters: Parameters, scale: LossScale | None) -> dict[str, Any]:
    """What a client shows, or needs for its loop."""
    training, optimizer = parameters.training, parameters.optimizer
    return {
        "batch_size": training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "accumulate_as": training.accumulate_as,
        "updates": training.steps // training.gradient_accumulation_steps,
        "seed": training.seed,
        "optimizer": optimizer.training_optimizer_name,
        "max_norm_clip": optimizer.max_norm_clip,
        "fixed_loss_scale": None if scale is None or scale.dynamic else scale.scale,
        "skipped_in_a_row": parameters.on_bad_loss.skip,
        "initial_lr": parameters.learning_rate.initial_lr,
        "warmup_mode": parameters.learning_rate.warmup_mode,
    }


def _model(parameters: Parameters, source: TrainingGraph) -> dict[str, Any]:
    """How the user's model was read, for `onward export --device-state`: sections without paths."""
    asked = parameters.to_mapping()
    read = {
        "training": ("tied_weights", "untied_weights", "freeze_batch_norm", "weights_not_to_train", "seed"),
        "loss": ("prediction",),
        "head": ("num_classes",),
    }
    sections = {section: {name: asked[section][name] for name in names} for section, names in read.items()}
    adapter = {name: value for name, value in asked["adapter"].items() if name != "start_path"}
    return {**sections, "adapter": adapter, "base_checksum": base_checksum(source.source, source.adapters)}
