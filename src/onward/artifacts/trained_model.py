"""`onward export`: the inference model of a checkpoint, without training anything.

Optimized or quantized on request, by the tools of `quantization`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from onward.artifacts.export_rehearsal import rehearse_export
from onward.artifacts.inference_mode import switch_to_inference
from onward.artifacts.inference_model import export, export_weights
from onward.artifacts.quantization import Calibration, optimize_model, quantize_model
from onward.checkpoint.manifest import read_manifest
from onward.checkpoint.reading import checkpoint_name, find_checkpoint, open_tensors, read_record
from onward.engine.evaluating.early_stopping import BestEvaluation
from onward.engine.reports import EvaluationReport
from onward.engine.state import TrainState
from onward.errors import CheckpointError, ParametersError, StorageError
from onward.exclusive.temporary import temporary_folder
from onward.graph.reading.lazy_file import read_model_lazily
from onward.graph.reading.model_file import prepare_for_lowering, read_model
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.graph.writing.model_saving import save_model
from onward.lowering.inspection import why_not_lowered
from onward.parallel.agreement import gather_numbers
from onward.parallel.gathering import describe_full, gather_full
from onward.parallel.sharded_tensors import ShardedTensor
from onward.parameters import Parameters
from onward.parameters.limits import DEFAULT_LIMITS, UNLIMITED, Limits
from onward.plan.pipeline.joined_models import join_stage_models
from onward.spelling import shortened


def export_state(state: TrainState, graph: TrainingGraph, path: Path) -> None:
    """Writes the inference model of a running training, from the parts that all processes hold; each calls this."""
    if state.mesh.world_size == 1:
        export(state.networks[0].net, path)
        return
    full = gather_full(state.mesh, _exported_tensors(state))
    if state.mesh.rank == 0:
        export_weights(graph, lambda name: full[name], path)


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
        rehearse_export_of_state(state, graph, None if output_dir is None else trained_model_path(parameters))


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
    parameters: Parameters, state: TrainState, graph: TrainingGraph, say: Callable[[str], None]
) -> None:
    """Loss and gradients, and the weight update, as ONNX graphs, where a run asks for them; rank 0 writes them."""
    paths, mesh = parameters.paths, state.mesh
    is_asked = paths.model_with_training_graph_path is not None or paths.optimizer_graph_path is not None
    if is_asked and mesh.rank == 0:
        from onward.artifacts.run_graphs import write_graphs_of_run  # torch's tracer takes seconds to import

        write_graphs_of_run(parameters, graph, state.networks[0].net, mesh.world_size == 1, say)


def export_run(
    parameters: Parameters,
    state: TrainState,
    graph: TrainingGraph,
    path: Path,
    best: BestEvaluation | None,
    last: EvaluationReport | None,
) -> str:
    """Writes the inference model of a run that ended, as `checkpoint.export` says; each process calls this.

    Args:
        parameters: of the run.
        state, graph: what was trained.
        path: where the model goes.
        best: the best evaluation, where the run compared them.
        last: an evaluation after the last update.

    Returns:
        What was written, for the user.
    """
    folder = parameters.checkpoint.checkpoints_dir
    if parameters.checkpoint.export == "best" and best is not None and best.best.value is not None:
        is_last = best.best.update == state.counters.update or (last is not None and best.beats(last))
        # Ranks that compute slightly different numbers must not go different ways.
        if not gather_numbers(state.mesh, float(is_last))[0] and folder is not None:
            if state.mesh.rank == 0:
                best_checkpoint = folder / checkpoint_name(best.best.update)
                export_checkpoint(parameters.model_files, best_checkpoint, path, limits=parameters.limits)
            reached = f"{best.settings.metric} {best.best.value:.4g} at step {best.best.step:,}"
            return f"trained model of the best evaluation ({reached})"
    export_state(state, graph, path)
    return "trained model"


def export_checkpoint(
    model: str | Path | Sequence[str | Path],
    checkpoint: str | Path,
    output: str | Path,
    *,
    optimize: bool = False,
    quantize: str | None = None,
    calibration_dir: str | Path | None = None,
    calibration_batch_size: int = 8,
    calibration_batches: int = 16,
    limits: Limits = DEFAULT_LIMITS,
) -> Path:
    """Writes a model with the weights and running statistics of a checkpoint.

    Args:
        model: the ONNX file that was trained, or the files of `distributed.pipeline_stage_paths`, which are joined.
        checkpoint: a checkpoint, or a folder of them (the latest is taken).
        output: where the trained model goes.
        optimize: fold constants and dead work with onnxscript's optimizer.
        quantize: "fp16", "int8-dynamic" or "int8-static".
        calibration_dir: shards whose samples calibrate "int8-static".
        calibration_batch_size, calibration_batches: how many of them.
        limits: what the model may ask of the machine.

    Raises:
        CheckpointError: no complete checkpoint, or one of another model.
        ParametersError: an option is missing or does not fit another.
        StorageError: the output cannot be written.
    """
    _check_options(quantize, calibration_dir)
    path, output = find_checkpoint(Path(checkpoint)), Path(output)
    graph = _graph_of_checkpoint([model] if isinstance(model, str | Path) else model, path, limits)
    stored = {
        name.partition("/")[2]: tensor
        for name, tensor in open_tensors(path).items()
        if name.startswith(("weights/", "states/"))
    }

    def read(name: str) -> torch.Tensor:
        return stored[name].read()

    def describe(name: str) -> torch.Tensor:
        return torch.empty(stored[name].shape, dtype=stored[name].dtype, device="meta")

    if not optimize and quantize is None:
        export_weights(graph, read, output, describe)
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
    manifest = read_manifest(checkpoint)
    training = read_record(checkpoint).get("parameters", {}).get("training", {})
    models = [read_model_lazily(Path(file), limits) for file in files]
    graph = make_training_graph(
        models[0] if len(models) == 1 else join_stage_models(models, limits),
        tied_weights=tuple(training.get("tied_weights", ())),
        untied_weights=tuple(training.get("untied_weights", ())),
        freeze_batch_norm=bool(training.get("freeze_batch_norm", False)),
        why_not_lowered=why_not_lowered,
        limits=limits,
    )
    model = " and ".join(repr(str(file)) for file in files)
    held = {
        name: tuple(int(size) for size in value.const_value.shape.numpy())
        for name, value in graph.model.graph.initializers.items()
        if value.const_value is not None
    }
    stored = {}
    for key, entry in manifest.tensors.items():
        kind, _, name = key.partition("/")
        if kind in ("weights", "states"):
            stored[name] = entry.shape
    wrong = sorted(name for name, shape in stored.items() if held.get(name) != tuple(shape))
    if wrong:
        listed = shortened((f"{name!r} {list(stored[name])}" for name in wrong), 5)
        raise CheckpointError(
            f"{checkpoint} is of another model: of its {len(stored)} weights and running statistics, {len(wrong)} are "
            f"not in {model} with these shapes: {listed}. Give the ONNX file that was trained."
        )
    lacking = [name for name in graph.states if name not in stored]
    if lacking:
        raise CheckpointError(
            f"{checkpoint} is of another model: it lacks {len(lacking)} running statistics of {model}, the "
            f"first {lacking[0]!r}. Give the ONNX file that was trained."
        )
    weights = tuple(name for name in stored if f"weights/{name}" in manifest.tensors)
    return replace(graph, weights=weights)
