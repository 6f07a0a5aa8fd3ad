"""`onward export`: the inference model of a checkpoint, without training anything.

Optimized or quantized on request, by the tools of `quantization`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onward.artifacts.adapter_outputs import check_outputs, place_of, write_form, write_outputs
from onward.artifacts.export_rehearsal import rehearse_export
from onward.artifacts.inference_model import export_weights
from onward.artifacts.quantization import Calibration, optimize_model, quantize_model
from onward.checkpoint.manifest import read_manifest
from onward.checkpoint.reading import checkpoint_name, exported_kinds, find_checkpoint, open_tensors, read_record
from onward.engine.evaluating.early_stopping import BestEvaluation
from onward.engine.reports import EvaluationReport
from onward.engine.state import TrainState
from onward.errors import CheckpointError, ParametersError, StorageError
from onward.exclusive.temporary import temporary_folder
from onward.graph.adapters.base_checksum import base_checksum, why_other_base
from onward.graph.distillation.adding import is_projection
from onward.graph.new_head import with_new_head
from onward.graph.quantize_aware.inserting import quantize_aware_model
from onward.graph.reading.lazy_file import read_model_lazily
from onward.graph.reading.model_file import prepare_for_lowering, read_model
from onward.graph.repair.inference_mode import switch_to_inference
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.graph.writing.model_saving import save_model
from onward.lowering.inspection import why_not_lowered
from onward.parallel.agreement import gather_numbers
from onward.parallel.gathering import describe_full, gather_full
from onward.parallel.sharded_tensors import ShardedTensor
from onward.parameters import Adapter, Parameters
from onward.parameters.adapter import MERGED, AdapterOutput
from onward.parameters.limits import DEFAULT_LIMITS, UNLIMITED, Limits
from onward.parameters.quantize_aware import QuantizeAware
from onward.plan.pipeline.joined_models import join_stage_models
from onward.spelling import shortened


def export_state(state: TrainState, graph: TrainingGraph, path: Path, adapter: Adapter = MERGED) -> None:
    """Writes the inference model of a running training, from the parts that all processes hold; each calls this.

    Args:
        state, graph: what was trained.
        path: where the model goes.
        adapter: in which forms adapters are written.
    """
    with state.averaged(state.exports_average):
        if state.mesh.world_size == 1:
            # The graph of the network may store frozen weights in fewer bits; what is written is the user's.
            write_outputs(graph, state.networks[0].net.tensors_by_name().__getitem__, path, adapter)
            return
        full = gather_full(state.mesh, _exported_tensors(state))
    if state.mesh.rank == 0:
        write_outputs(graph, full.__getitem__, path, adapter)


def trained_model_path(parameters: Parameters) -> Path:
    """Where a run writes its model: `<output_dir>/<model>_trained.onnx`, or `joined_trained.onnx`.

    Raises:
        ParametersError: no folder is given.
    """
    paths = parameters.paths
    if paths.output_dir is None:
        raise ParametersError("paths.output_dir is not set; there is no trained model.")
    name = "joined" if paths.model_path is None else paths.model_path.stem
    return paths.output_dir / f"{name}_trained.onnx"


def rehearse_export_of_run(parameters: Parameters, state: TrainState, graph: TrainingGraph) -> None:
    """What training ends with must be possible before it begins; nothing to do for a run that writes nothing."""
    output_dir = parameters.paths.output_dir
    if output_dir is not None or parameters.checkpoint.checkpoints_dir is not None:
        if not graph.adapters or "merged" in parameters.adapter.outputs:
            rehearse_export_of_state(state, graph, None if output_dir is None else trained_model_path(parameters))
        check_outputs(graph, parameters.adapter)


def rehearse_export_of_state(state: TrainState, graph: TrainingGraph, path: Path | None) -> None:
    """What `export_state` will do, but for reading and writing values; each process calls this.

    Args:
        state: before training.
        graph: what is trained.
        path: where the model will go; None: that is not known.

    Raises:
        StorageError: the model cannot be written there.
        ModelError: it cannot be assembled.
    """
    outlines = describe_full(state.mesh, _exported_tensors(state))
    if state.mesh.rank == 0:
        rehearse_export(graph, lambda name: outlines[name], path)


def _exported_tensors(state: TrainState) -> dict[str, ShardedTensor]:
    tensors = {key.partition("/"): sharded for key, sharded in state.sharded_tensors().items()}
    return {name: sharded for (kind, _, name), sharded in tensors.items() if kind in ("weights", "states")}


def write_graphs_if_asked(
    parameters: Parameters, state: TrainState, graph: TrainingGraph, notify: Callable[[str], None]
) -> None:
    """Loss and gradients, and the weight update, as ONNX graphs, where a run asks for them; rank 0 writes them."""
    paths, mesh = parameters.paths, state.mesh
    is_asked = paths.model_with_training_graph_path is not None or paths.optimizer_graph_path is not None
    if is_asked and mesh.rank == 0:
        from onward.artifacts.run_graphs import write_graphs_of_run  # torch's tracer takes seconds to import

        write_graphs_of_run(parameters, graph, state.networks[0].net, mesh.world_size == 1, notify)


def export_run(
    parameters: Parameters,
    state: TrainState,
    graph: TrainingGraph,
    path: Path,
    best: BestEvaluation | None,
    last: EvaluationReport | None,
    weights: str | None = None,
) -> str:
    """Writes the inference model of a run that ended, as `checkpoint.export` says; each process calls this.

    Args:
        parameters: of the run.
        state, graph: what was trained.
        path: where the model goes.
        best: the best evaluation, where the run compared them.
        last: an evaluation after the last update.
        weights: which weights the network holds, where that was settled before and they are to be written, in words
            that continue "trained model".

    Returns:
        What was written, for the user.
    """
    folder, exports_best = parameters.checkpoint.checkpoints_dir, parameters.checkpoint.export == "best"
    if weights is None and best is not None and best.best.value is not None:
        is_last = best.best.update == state.counters.update or (last is not None and best.beats(last))
        # Ranks that compute slightly different numbers must not go different ways.
        is_last = bool(gather_numbers(state.mesh, float(is_last))[0])
        if exports_best and not is_last and folder is not None:
            if state.mesh.rank == 0:
                best_checkpoint = folder / checkpoint_name(best.best.update)
                for form in parameters.adapter.outputs:
                    place = place_of(form, path)
                    export_checkpoint(
                        parameters.model_files, best_checkpoint, place, form=form, limits=parameters.limits
                    )
            return f"trained model of the best evaluation ({best.reached()})"
        weights = last_of_best(best, last) if is_last else LAST_WEIGHTS
    export_state(state, graph, path, parameters.adapter)
    if state.exports_average and state.average is not None:
        kind, count = state.average.settings.kind, state.average.count
        of_best = f", {weights}" if weights not in (None, LAST_WEIGHTS) else ""
        return f"trained model with the average ({kind}) of its weights after {count:,} updates{of_best}"
    if weights is None and exports_best:
        metric = parameters.early_stopping.metric
        return f"trained model with the last weights, for want of an evaluation to compare by {metric}"
    return "trained model" if weights is None else f"trained model {weights}"


LAST_WEIGHTS = "with the last weights"


def last_of_best(best: BestEvaluation, last: EvaluationReport | None) -> str:
    """Which weights the last ones are, where their evaluation is the best, in words that continue "trained model"."""
    return f"of the best evaluation ({best.reached(last)}, the last one)"


def export_checkpoint(
    model: str | Path | Sequence[str | Path],
    checkpoint: str | Path,
    output: str | Path,
    *,
    form: AdapterOutput = "merged",
    optimize: bool = False,
    quantize: str | None = None,
    calibration_dir: str | Path | None = None,
    calibration_batch_size: int = 8,
    calibration_batches: int = 16,
    weights: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Path:
    """Writes a model with the weights and running statistics of a checkpoint.

    Args:
        model: the ONNX file that was trained, or the files of `distributed.pipeline_stage_paths`, which are joined.
        checkpoint: a checkpoint, or a folder of them (the latest is taken).
        output: where the trained model goes.
        form: of a model that was trained with adapters: merged, a folder for PEFT, or an adapter of ONNX Runtime.
        optimize: fold constants and dead work with onnxscript's optimizer.
        quantize: "fp16", "int8-dynamic" or "int8-static".
        calibration_dir: shards whose samples calibrate "int8-static".
        calibration_batch_size, calibration_batches: how many of them.
        weights: "average" or "last", where the run kept an average; None: as its `averaging.export` says.
        limits: what the model may ask of the machine.

    Raises:
        CheckpointError: no complete checkpoint, or one of another model.
        ParametersError: an option is missing or does not fit another.
        StorageError: the output cannot be written.
    """
    _check_options(quantize, calibration_dir)
    path, output = find_checkpoint(Path(checkpoint)), Path(output)
    graph = _graph_of_checkpoint([model] if isinstance(model, str | Path) else model, path, limits)
    tensors = open_tensors(path)
    stored = {
        name.partition("/")[2]: tensor
        for kind in exported_kinds(read_record(path), weights)
        for name, tensor in tensors.items()
        if name.startswith(kind)
    }

    def read(name: str) -> torch.Tensor:
        return stored[name].read()

    def describe(name: str) -> torch.Tensor:
        return torch.empty(stored[name].shape, dtype=stored[name].dtype, device="meta")

    if form != "merged" and (optimize or quantize is not None):
        raise ParametersError(f"--optimize and --quantize convert merged models; leave them out with --adapter {form}.")
    if not optimize and quantize is None:
        adapter = adapter_of(read_record(path).get("parameters", {}))
        write_form(form, graph, read, output, adapter, describe)
        return output
    with _workplace(output) as folder:
        step = folder / "trained.onnx"
        export_weights(graph, read, step, describe)
        calibration = None
        if calibration_dir is not None:
            name_map = read_record(path).get("parameters", {}).get("data", {}).get("input_name_map", {})
            calibration = Calibration(Path(calibration_dir), name_map, calibration_batch_size, calibration_batches)
        save_model(read_model(_converted(step, optimize, quantize, calibration), UNLIMITED), output)
    return output


def convert_model(
    model: str | Path,
    output: str | Path,
    *,
    optimize: bool = False,
    quantize: str | None = None,
    calibration_dir: str | Path | None = None,
    calibration_batch_size: int = 8,
    calibration_batches: int = 16,
    limits: Limits = DEFAULT_LIMITS,
) -> Path:
    """Writes a model as it is, optimized or quantized: one that is trained already. Arguments as `export_checkpoint`.

    Raises:
        ModelError: the model cannot be read or converted.
        ParametersError: an option is missing or does not fit another.
        StorageError: the output cannot be written.
    """
    _check_options(quantize, calibration_dir)
    output, source = Path(output), read_model(Path(model), limits)
    prepare_for_lowering(source, limits)  # refuses what the tools would compute from constants beyond the limits
    switch_to_inference(source)
    with _workplace(output) as folder:
        step = folder / "model.onnx"
        save_model(source, step)
        calibration = None
        if calibration_dir is not None:
            calibration = Calibration(Path(calibration_dir), {}, calibration_batch_size, calibration_batches)
        save_model(read_model(_converted(step, optimize, quantize, calibration), UNLIMITED), output)
    return output


def _check_options(quantize: str | None, calibration_dir: str | Path | None) -> None:
    if quantize == "int8-static" and calibration_dir is None:
        raise ParametersError("--quantize int8-static needs --calibration-data DIR, shards of typical samples.")
    if quantize != "int8-static" and calibration_dir is not None:
        raise ParametersError("--calibration-data is read by --quantize int8-static only; set that, or leave it out.")


@contextlib.contextmanager
def _workplace(output: Path) -> Iterator[Path]:
    """A temporary folder next to the output."""
    with contextlib.ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(temporary_folder(output))
        except OSError as error:
            raise StorageError(
                f"{str(output)!r} cannot be written: {error.strerror or error}. Choose another path for the model."
            ) from error
        yield folder


def _converted(step: Path, optimize: bool, quantize: str | None, calibration: Calibration | None) -> Path:
    """The file that a model becomes, next to it."""
    if optimize:
        step = optimize_model(step, step.with_name("optimized.onnx"), UNLIMITED)
    if quantize is not None:
        step = quantize_model(step, step.with_name("quantized.onnx"), quantize, calibration, UNLIMITED)
    return step


def _graph_of_checkpoint(files: Sequence[str | Path], checkpoint: Path, limits: Limits) -> TrainingGraph:
    """The training graph of a model, its trained weights those that the checkpoint holds."""
    record, tensors = read_record(checkpoint), read_manifest(checkpoint).tensors
    shapes = {key: tuple(entry.shape) for key, entry in tensors.items()}
    base = str(record.get("base_checksum", ""))
    return graph_as_trained(files, record.get("parameters", {}), shapes, base, str(checkpoint), limits)


def graph_as_trained(
    files: Sequence[str | Path],
    parameters: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    base: str,
    source: str,
    limits: Limits,
) -> TrainingGraph:
    """The training graph of a model, its trained weights those that something holds.

    Args:
        files: of the model.
        parameters: of the run, as plain mappings of its sections.
        shapes: of what is held: `weights/<name>` and `states/<name>`; others are ignored.
        base: checksum of the model that adapters were trained on; "" without adapters.
        source: what holds them, for messages.
        limits: what the model may ask of the machine.

    Raises:
        CheckpointError: it is of another model.
        ModelError: the model cannot be read.
    """
    training, adapter = parameters.get("training", {}), adapter_of(parameters)
    models = [read_model_lazily(Path(file), limits) for file in files]
    model = models[0] if len(models) == 1 else join_stage_models(models, limits)
    loss, head = parameters.get("loss", {}), parameters.get("head", {})
    seed = int(training.get("seed", 0))
    headed, _ = with_new_head(model, loss.get("prediction"), head.get("num_classes"), seed, limits)
    graph = make_training_graph(
        quantize_aware_model(headed, QuantizeAware(**parameters.get("quantize_aware", {})), limits),
        tied_weights=tuple(training.get("tied_weights", ())),
        untied_weights=tuple(training.get("untied_weights", ())),
        freeze_batch_norm=bool(training.get("freeze_batch_norm", False)),
        weights_not_to_train=() if adapter.rank is None else tuple(training.get("weights_not_to_train", ())),
        adapter=adapter,
        seed=seed,
        why_not_lowered=why_not_lowered,
        limits=limits,
    )
    named = " and ".join(repr(str(file)) for file in files)
    held = {
        name: tuple(int(size) for size in value.const_value.shape.numpy())
        for name, value in graph.model.graph.initializers.items()
        if value.const_value is not None
    }
    stored = {}
    for key, shape in shapes.items():
        kind, _, name = key.partition("/")
        if kind in ("weights", "states") and not is_projection(name):
            stored[name] = shape
    wrong = sorted(name for name, shape in stored.items() if held.get(name) != shape)
    if wrong:
        listed = shortened((f"{name!r} {list(stored[name])}" for name in wrong), 5)
        raise CheckpointError(
            f"{source} is of another model: of its {len(stored)} weights and running statistics, {len(wrong)} are "
            f"not in {named} with these shapes: {listed}. Give the ONNX file that was trained."
        )
    lacking = [name for name in graph.states if name not in stored]
    if lacking:
        raise CheckpointError(
            f"{source} is of another model: it lacks {len(lacking)} running statistics of {named}, the "
            f"first {lacking[0]!r}. Give the ONNX file that was trained."
        )
    if why := why_other_base(base, base_checksum(graph.source, graph.adapters)):
        raise CheckpointError(f"{source} is of another model: {why}")
    weights = tuple(name for name in stored if f"weights/{name}" in shapes)
    adapters = {name: adapted for name, adapted in graph.adapters.items() if adapted.a in stored}
    return replace(graph, weights=weights, adapters=adapters)


def adapter_of(parameters: Mapping[str, Any]) -> Adapter:
    """The section `adapter` of a checkpoint's record; what its adapters began as is not needed any more."""
    return replace(Adapter.from_fields(parameters.get("adapter", {})), start_path=None)
