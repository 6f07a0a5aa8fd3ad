"""`onward export`: a trained model from a checkpoint, and graphs to train with."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.commands.overrides import read_limits, read_overrides
from onward.errors import NoteWarning, ParametersError
from onward.graph.reading.garbage_collection import importing
from onward.report.phases import Phases

if TYPE_CHECKING:
    from onward.parameters.adapter import AdapterOutput
    from onward.parameters.limits import Limits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, what to write and how."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="+", help="the .onnx file that was trained, or those of its pipeline stages"
    )
    parser.add_argument("--checkpoint", metavar="DIR", help="a checkpoint, or a folder of them")
    parser.add_argument("--device-state", metavar="FILE", help="a state that a client of a device bundle saved")
    parser.add_argument("--bundle", metavar="DIR", help="with --device-state: the bundle (default: the state's folder)")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the trained model goes")
    parser.add_argument(
        "--weights", choices=("average", "last"), help="of a run that averaged (default: its averaging.export)"
    )
    parser.add_argument(
        "--adapter",
        choices=("merged", "peft", "onnx_adapter"),
        help="write trained adapters into the model, as a folder for PEFT, or as an .onnx_adapter with its base",
    )
    parser.add_argument("--optimize", action="store_true", help="fold constants and fuse what onnxscript can")
    parser.add_argument("--quantize", choices=("fp16", "int8-dynamic", "int8-static"), help="write in lower precision")
    parser.add_argument(
        "--dequantize",
        choices=("qdq", "float"),
        help="write the quantized MODEL with float32 weights, to train it: qdq keeps the rounding, float does not",
    )
    parser.add_argument("--calibration-data", metavar="DIR", help="shards for int8-static")
    parser.add_argument("--calibration-batch-size", type=int, default=8, metavar="N", help="samples per batch (8)")
    parser.add_argument(
        "--calibration-batches", type=int, default=16, metavar="N", help="maximum number of batches (16)"
    )
    parser.add_argument("--training-graph", metavar="FILE", help="where loss and gradients go as an ONNX graph")
    parser.add_argument("--optimizer-graph", metavar="FILE", help="where the weight update goes as an ONNX graph")
    parser.add_argument("--train-step", metavar="FILE", help="where an entire training step goes as an ONNX graph")
    parser.add_argument("--training-info", metavar="FILE", help="where the model goes with its TrainingInfoProto")
    parser.add_argument("--run", metavar="RUN.yaml", dest="run_file", help="loss and optimizer of these graphs")


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Writes what was asked for.

    Raises:
        UserError: options do not fit together, or a file cannot be read or written.
    """
    if options.dequantize is not None:
        phases.begin(f"dequantizing {options.model[0]}")
        _export_dequantized(options, read_limits(rest))
        return
    if options.device_state is not None:
        phases.begin(f"writing {options.output}")
        _export_device_state(options, read_limits(rest))
        return
    if options.training_graph or options.optimizer_graph or options.train_step or options.training_info:
        phases.begin("writing graphs to train with")
        _export_graphs(options, rest)
    elif options.run_file is not None:
        raise ParametersError(
            "--run goes with --training-graph, --optimizer-graph, --train-step or --training-info FILE; name one."
        )
    elif options.output is None or not (options.checkpoint or options.optimize or options.quantize):
        raise ParametersError(
            "Pass -o FILE with --checkpoint DIR for a trained model, or with --optimize or --quantize to convert MODEL "
            "as it is; pass --run RUN.yaml with --training-graph, --optimizer-graph, --train-step or --training-info "
            "FILE for a graph to train with."
        )
    if options.output is not None:
        conversions = [*(["optimized"] if options.optimize else []), *([options.quantize] if options.quantize else [])]
        phases.begin(" and ".join([f"writing {options.output}", *conversions]))
        _export_trained(options, read_limits(rest))


def _export_dequantized(options: argparse.Namespace, limits: Limits) -> None:
    with importing():
        from onward.artifacts.dequantized_model import write_dequantized
    from onward.exclusive.lock import writing_to

    graphs = (options.training_graph, options.optimizer_graph, options.train_step, options.training_info)
    if any((*graphs, options.run_file, options.checkpoint, options.optimize, options.quantize)):
        raise ParametersError(
            "--dequantize makes a model to train out of a quantized one; give it MODEL and -o FILE alone, and export "
            "the trained model afterwards."
        )
    if options.output is None or len(options.model) > 1:
        raise ParametersError("--dequantize takes one MODEL and needs -o FILE.")
    with writing_to(files=[Path(options.output)]):
        rounds = options.dequantize == "qdq"
        result = write_dequantized(options.model[0], options.output, keep_rounding=rounds, limits=limits)
    print(result.describe())
    print(f"wrote {options.output}")


def _export_device_state(options: argparse.Namespace, limits: Limits) -> None:
    with importing():
        from onward.device.returning import export_device_state
    from onward.exclusive.lock import writing_to

    if options.output is None or len(options.model) > 1 or options.checkpoint or options.optimize or options.quantize:
        raise ParametersError(
            "--device-state takes one MODEL and needs -o FILE, without --checkpoint, --optimize and --quantize; "
            "convert the model that it writes."
        )
    bundle = options.bundle or Path(options.device_state).parent
    form: AdapterOutput = options.adapter or "merged"
    with writing_to(files=[Path(options.output)]):
        export_device_state(
            options.model[0], options.device_state, options.output, bundle=bundle, form=form, limits=limits
        )
    print(f"wrote {options.output}")


def _export_graphs(options: argparse.Namespace, rest: Sequence[str]) -> None:
    with importing():
        from onward.artifacts.run_graphs import export_graphs
    from onward.exclusive.lock import writing_to

    if options.run_file is None:
        raise ParametersError("training graphs need a loss and an optimizer; name them with --run RUN.yaml.")
    if options.output is not None and options.checkpoint is None:
        raise ParametersError("-o FILE, the trained model, needs --checkpoint DIR.")
    if len(options.model) > 1:
        raise ParametersError(f"training graphs are of one model; {len(options.model)} are given.")
    graphs = (options.training_graph, options.optimizer_graph, options.train_step, options.training_info)
    with writing_to(files=[Path(graph) for graph in graphs if graph]):
        written = export_graphs(
            options.model[0],
            options.run_file,
            checkpoint=options.checkpoint,
            training_graph=options.training_graph,
            optimizer_graph=options.optimizer_graph,
            train_step=options.train_step,
            training_info=options.training_info,
            overrides=read_overrides(rest, "limits"),
            notify=print,
        )
    for path in written:
        print(f"wrote {path}")


def _export_trained(options: argparse.Namespace, limits: Limits) -> None:
    with importing():
        from onward.artifacts.trained_model import convert_model, export_checkpoint
        from onward.checkpoint.reading import find_checkpoint, note_on_taken
    from onward.exclusive.lock import writing_to
    from onward.remote.copies import local_folder, local_model, uploaded
    from onward.remote.files import shown

    if options.weights is not None and options.checkpoint is None:
        raise ParametersError(f"--weights {options.weights} chooses weights of a checkpoint; pass --checkpoint DIR.")
    if options.checkpoint is None and len(options.model) > 1:
        raise ParametersError(f"{len(options.model)} models are given; without --checkpoint DIR, pass one.")
    if options.adapter is not None and options.checkpoint is None:
        raise ParametersError(f"--adapter {options.adapter} writes adapters of a checkpoint; pass --checkpoint DIR.")
    target = Path(options.output)
    conversion: dict[str, Any] = {
        "optimize": options.optimize,
        "quantize": options.quantize,
        "calibration_dir": options.calibration_data,
        "calibration_batch_size": options.calibration_batch_size,
        "calibration_batches": options.calibration_batches,
        "limits": limits,
    }
    with writing_to(files=[target]), uploaded(target) as written:
        if options.checkpoint is None:
            convert_model(local_model(Path(options.model[0])), written, **conversion)
        else:
            folder = local_folder(Path(options.checkpoint))
            form: AdapterOutput = options.adapter or "merged"
            export_checkpoint(options.model, folder, written, form=form, weights=options.weights, **conversion)
    print(f"wrote {shown(target)}")
    if options.checkpoint is not None and (note := note_on_taken(folder, find_checkpoint(folder))):
        warnings.warn(note, NoteWarning, stacklevel=2)
