"""`onward.fit`: trains a model on data of any kind in one call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import nn

from onward.checkpoint.reading import find_latest
from onward.data.batches import BatchSource
from onward.data.sources.columns import column_names, is_frame
from onward.data.sources.iterated import IteratedDataLoader
from onward.data.sources.naming import FeatureNames
from onward.data.sources.opening import ReadingOptions, holds_shards, open_data, open_test_part
from onward.data.sources.temporary import TemporaryFolder
from onward.engine.callbacks import check_watchers
from onward.engine.functions import LossFunction, MetricFunction
from onward.engine.reports import RunSummary, Watcher
from onward.environment import Environment
from onward.errors import DataError, ModelError, ParametersError
from onward.fitting.best_weights import BestWeights
from onward.fitting.choosing import choose, choose_for_path
from onward.fitting.history import History
from onward.fitting.request import MOST_LOG_LINES, ModelPorts, Wanted, displays_by_default, loss_of, parameters_of
from onward.fitting.result import FitResult, was_interrupted
from onward.graph.reading.model_file import ModelSource, read_model
from onward.losses.registry import loss_named
from onward.parallel.agreement import agree_on_least
from onward.parallel.launch.process import Mesh, start
from onward.parallel.rendezvous.launcher import detect
from onward.parameters import Loss
from onward.parameters.distributed import Distributed
from onward.parameters.limits import Limits
from onward.proposal.matching import is_label_name
from onward.report.phases import Phases
from onward.report.run_watchers import progress_watcher
from onward.runner import TrainingRunner


def fit(
    model: ModelSource,
    data: Any,
    *,
    loss: str | Loss | Mapping[str, Any] | LossFunction | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    optimizer: str | None = None,
    validation_data: Any = None,
    validation_fraction: float | None = None,
    metrics: Sequence[Any] | Mapping[str, MetricFunction] = (),
    callbacks: Sequence[Watcher] = (),
    label: str | None = None,
    prediction: str | None = None,
    input_name_map: Mapping[str, str] | None = None,
    weights_to_train: Sequence[str] = (),
    weights_not_to_train: Sequence[str] = (),
    adapter: int | Mapping[str, Any] | None = None,
    gradient_accumulation_steps: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    output_dir: str | os.PathLike[str] | None = None,
    checkpoints_dir: str | os.PathLike[str] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Environment | None = None,
    progress: bool = True,
) -> FitResult:
    """Trains an ONNX model on data and returns the trained network with its history.

    With early stopping or `checkpoint.keep_best` it holds the weights of the best evaluation. Ctrl-C returns what was
    trained so far (`result.is_interrupted`); SIGTERM, and any signal to one of several processes, raises.

    Args:
        model: an `.onnx` file, an `onnx.ModelProto` or an `onnx_ir.Model`.
        data: a dictionary of arrays (numpy, torch, lists), a tuple `(x, y)`, a pandas, polars or Arrow table, a torch
            or Hugging Face data set, a torch `DataLoader`, an iterable of batches or samples (dictionaries or tuples),
            a folder or file that `onward pack` takes, a folder of shards (of one with `train` and `val`, the latter
            is evaluated), or an `onward.DataLoader`.
        loss: a name (`softmax_cross_entropy`, `mean_squared_error`, `binary_cross_entropy`, `l1`, `output`; also
            `cross_entropy`, `mse`, `bce`, `mae`; `bce` is computed from logits, or from probabilities if the model
            ends in them), a torch function of (outputs, batch), a `Loss` or its fields; left out: chosen from model
            and data, with batch size, learning rate and epochs, as `onward init` does.
        epochs, steps, batch_size: passes over the data, 1 by default, or forward/backward passes; samples per batch,
            32 by default (data that are batched already keep their own).
        learning_rate, optimizer: 0.001 and `AdamW` by default; also `Adam`, `SGDOptimizer`, `Lamb`.
        validation_data, validation_fraction: what is evaluated after every epoch: data of any kind, or a share of
            `data`, drawn by `seed`.
        metrics, callbacks: names, or a dictionary of functions of (outputs, batch); `onward.Callback`s and watchers.
        label, prediction: the feature and the output that the loss compares, where there are several.
        input_name_map: name in the data -> name in the model, or of the label; "" leaves a feature out.
        weights_to_train, weights_not_to_train: names or `*`-patterns of weights.
        adapter: train low-rank adapters of this rank instead of the weights, or the section `adapter` of a RUN.yaml.
        gradient_accumulation_steps, shuffle, seed: batches of one weight update; the order of samples (of loaders and
            iterables their own).
        output_dir, checkpoints_dir, log_dir: where `<model>_trained.onnx`, checkpoints (from which a call resumes),
            TensorBoard's files and `metrics.jsonl` go; None: nowhere.
        parameters: any further fields of a RUN.yaml, section to fields; they override the arguments above.
        environment, progress: the machine; whether to show progress on the console, or in the notebook.

    Raises:
        ModelError: the model cannot be read or trained.
        DataError: the data are of no known kind or do not fit the model.
        ParametersError: arguments contradict each other, or what the loss compares is ambiguous.
    """
    given = {name: value for name, value in dict(locals()).items() if name in Wanted.__dataclass_fields__}
    check_watchers(callbacks)
    wanted = Wanted(**{**given, "input_name_map": input_name_map or {}, "parameters": parameters or {}})
    validation = _Validation(validation_data, validation_fraction)
    return _fit(model, data, wanted, validation, callbacks, environment or Environment(), progress)


class _Validation:
    """What is evaluated: other data, or a fraction of the training data."""

    def __init__(self, data: Any, fraction: float | None) -> None:
        if data is not None and fraction is not None:
            raise ParametersError("validation_data and validation_fraction are both set; pass one of the two.")
        self.data = data
        self.fraction = fraction

    @property
    def is_left_out(self) -> bool:
        """Whether nothing was asked for."""
        return self.data is None and self.fraction is None

    def take_from(self, source: BatchSource, seed: int) -> tuple[BatchSource, Any]:
        """The training data that are left, and what is evaluated.

        Raises:
            DataError: no share can be taken from data of this kind.
        """
        if self.fraction is None:
            return source, self.data
        split: Callable[[float, int], tuple[BatchSource, BatchSource]] | None = getattr(source, "split", None)
        if split is None:
            raise DataError(
                f"validation_fraction is {self.fraction:g}, but {type(source).__name__} cannot be split, because its "
                "samples cannot be indexed. Pass validation_data, or the samples as arrays or a map-style data set; "
                "split a folder with onward pack --test-fraction."
            )
        return split(self.fraction, seed)


def _fit(
    model: ModelSource,
    data: Any,
    wanted: Wanted,
    validation: _Validation,
    callbacks: Sequence[Watcher],
    environment: Environment,
    progress: bool,
) -> FitResult:
    shows = progress and detect().rank == 0
    with Phases(progress_watcher().on_message) if shows else Phases.silent() as phases:
        phases.begin("reading the model")
        folder, ports = _ports_of(model, Limits.from_fields(wanted.parameters.get("limits", {})))
        environment.apply()
        mesh = start(Distributed(**wanted.parameters.get("distributed", {})), environment.device_kind)
        phases.begin("opening the data")
        opened = _open(data, wanted, ports, mesh, validation)
    try:
        source, evaluated, wanted = opened.source, opened.evaluated, opened.wanted
        loss = loss_of(wanted, ports, tuple(source.feature_specs()))
        parameters = parameters_of(wanted, ports, loss, source, evaluated is not None, _agreeing(mesh))
        history = History()
        own = dict(wanted.metrics) if isinstance(wanted.metrics, Mapping) else {}
        watchers = [*callbacks, history]
        runner = TrainingRunner(
            parameters,
            environment,
            watchers,
            mesh,
            progress=progress,
            most_log_lines=MOST_LOG_LINES if displays_by_default(wanted) else None,
            metrics=own,
            returns_on_interrupt=True,
        )
        runner.watchers.on_messages([*getattr(source, "messages", ()), *opened.notes])
        runner.initialize(source.feature_specs())
        summary, held = _train(runner, source, evaluated)
    finally:
        for one, given in ((opened.source, data), (opened.evaluated, validation.data)):
            if one is not None and one is not given:
                one.close()
    runner.watchers.raise_failures()
    return FitResult(runner, history, summary, folder, held)


def _train(runner: TrainingRunner, source: BatchSource, evaluated: Any) -> tuple[RunSummary, int]:
    """Trains and ends the run with the weights that the result is to hold; returns of which update they are."""
    kept = None
    if runner.best is not None:
        kept = BestWeights(runner.best, runner.state, runner.parameters.checkpoint)
        runner.watchers.add([kept])
    with _naming_checkpoint(runner):
        summary = runner.run(source, evaluated)
    held, last_data = runner.state.counters.update, None if was_interrupted(summary) else evaluated
    words = None
    if kept is not None:
        settled = kept.settle(None if last_data is None else lambda: runner.evaluate(last_data))
        held, words = held if settled.update is None else settled.update, settled.words
        runner.watchers.on_messages([] if settled.note is None else [settled.note])
    runner.end_training(last_data, weights=words)
    return summary, held


@contextlib.contextmanager
def _naming_checkpoint(runner: TrainingRunner) -> Iterator[None]:
    """Says in a note of what is raised that the next call with these checkpoints continues, also with other data."""
    try:
        yield
    except Exception as error:
        folder = runner.parameters.checkpoint.checkpoints_dir
        newest = None if folder is None else find_latest(folder)
        if folder is not None and newest is not None:
            error.add_note(
                f"checkpoints_dir holds {newest.name}: a fit with the same checkpoints_dir resumes from it, whatever "
                "its data are. To start over, pass another folder or delete this one: "
                f"{runner.files.shown(folder)}."
            )
        raise


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """Data and arguments, of which either helps to understand the other.

    Attributes:
        source: of training batches.
        evaluated: data of any kind; None: nothing is evaluated.
        wanted: the arguments, those that were left out chosen.
        notes: for the user.
        folder: of packed data, as long as this lives.
    """

    source: BatchSource
    evaluated: Any
    wanted: Wanted
    notes: tuple[str, ...] = ()
    folder: TemporaryFolder | None = None


def _open(data: Any, wanted: Wanted, ports: ModelPorts, mesh: Mesh, validation: _Validation) -> _Opened:
    """Opens the data; chooses the loss and what else was left out, where none is given."""
    wanted = _with_label_of_frame(wanted, data)
    place = mesh.reader, mesh.topology.reader_count
    reading = ReadingOptions(
        shuffle=wanted.shuffle, seed=wanted.seed, rank=place[0], size=place[1], limits=ports.limits
    )
    if wanted.loss is None and isinstance(data, str | os.PathLike) and not holds_shards(Path(data)):
        folder = TemporaryFolder("onward-packed-")
        wanted, source, test, note = choose_for_path(wanted, ports, Path(data), folder, reading)
        evaluated = test if validation.is_left_out else validation.take_from(source, wanted.seed)[1]
        return _Opened(source=source, evaluated=evaluated, wanted=wanted, notes=(note,), folder=folder)
    source = open_data(data, _names(wanted, ports), reading)
    _refuse_second_reading(source, wanted)
    if validation.is_left_out:
        validation = _Validation(open_test_part(data, source, _names(wanted, ports)), None)
    if wanted.loss is not None:
        source, evaluated = validation.take_from(source, wanted.seed)
        return _Opened(source=source, evaluated=evaluated, wanted=wanted)
    named = wanted.input_name_map
    wanted, note = choose(wanted, ports, source, not validation.is_left_out)
    if wanted.input_name_map != named and source is not data:
        source = open_data(data, _names(wanted, ports), reading)
    source, evaluated = validation.take_from(source, wanted.seed)
    return _Opened(source=source, evaluated=evaluated, wanted=wanted, notes=(note,))


def _with_label_of_frame(wanted: Wanted, data: Any) -> Wanted:
    """A table's label column by its name, so that it does not become a part of the input."""
    if wanted.label is not None or not is_frame(data) or not (wanted.loss is None or isinstance(wanted.loss, str)):
        return wanted
    renamed = [str(wanted.input_name_map.get(str(name), name)) for name in column_names(data) or ()]
    named = [name for name in renamed if is_label_name(name)]
    return replace(wanted, label=named[0]) if len(named) == 1 and named[0] != "label" else wanted


def _names(wanted: Wanted, ports: ModelPorts) -> FeatureNames:
    loss = wanted.loss
    named = loss.label if isinstance(loss, Loss) else wanted.label
    return FeatureNames(ports.inputs, _labels(loss, named), wanted.input_name_map)


def _labels(loss: Any, named: str | None) -> tuple[str, ...]:
    if isinstance(loss, Loss) and len(loss_named(loss.type).labels) > 1:
        return tuple(getattr(loss, field) for field in loss_named(loss.type).labels)
    return ("label" if named is None else named,)


def _refuse_second_reading(source: BatchSource, wanted: Wanted) -> None:
    if not isinstance(source, IteratedDataLoader) or not source.is_one_shot:
        return
    if wanted.epochs is not None and wanted.epochs > 1:
        raise DataError(
            f"epochs is {wanted.epochs:g}, but the data are an iterator, which can be read only once. Pass a list, a "
            "DataLoader or an object whose __iter__ starts again, or epochs=1."
        )
    if wanted.steps is None:
        raise DataError(
            "the data are an iterator of unknown length, and the learning-rate schedule needs the number of steps. "
            "Pass steps=..., or list(data) if the data fit in memory."
        )


def _agreeing(mesh: Mesh) -> Callable[[int], int]:
    """The most steps that any rank counts, for all ranks."""
    return lambda steps: int(-agree_on_least(mesh, -float(steps)))


def _ports_of(model: ModelSource, limits: Limits) -> tuple[TemporaryFolder | None, ModelPorts]:
    """The model's file, written to a temporary folder where it is in memory, and what it takes and gives."""
    if isinstance(model, nn.Module):
        raise ModelError(
            f"model is a torch module ({type(model).__name__}); expected an ONNX model. Export it first: "
            "torch.onnx.export(module, example_inputs, 'model.onnx', dynamo=True), or pass the file that to_torch read."
        )
    folder = None
    if isinstance(model, str | os.PathLike):
        path = Path(model)
    else:
        folder = TemporaryFolder("onward-model-")
        path = folder.path / "model.onnx"
        ir.save(model if isinstance(model, ir.Model) else ir.from_proto(model), path, external_data="model.data")
    graph = read_model(path, limits).graph
    inputs = {
        str(value.name): None if value.shape is None else len(value.shape)
        for value in graph.inputs
        if not value.is_initializer()
    }
    return folder, ModelPorts(path, inputs, tuple(str(value.name) for value in graph.outputs), limits)
