"""The command line: argv -> Parameters -> the story. One function a command; each imports what it needs when it runs.

Exit codes: 0 done, 2 the user's mistake (one clear message), 3 interrupted but saved, 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from onward import __version__
from onward.errors import Interrupted, OnwardError, ParametersError, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    parser = _make_parser()
    known, rest = parser.parse_known_args(argv)
    takes_fields = known.command in ("plan", "train")
    if rest and not takes_fields:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        known.run(known, rest) if takes_fields else known.run(known)
    except OnwardError as error:
        print(f"onward {known.command}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 3 if isinstance(error, Interrupted) else 1
    except KeyboardInterrupt:
        # While it trains, `train` saves and says so (Interrupted); here there was nothing to save.
        print(f"onward {known.command}: interrupted.", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has left; what it wanted it has.
        sys.stderr.close()
        return 1
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="onward", description="Train any ONNX model. ONNX in, ONNX out.")
    parser.add_argument("--version", action="version", version=f"onward {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    from onward.data.packing import command as packing
    from onward.models import create as creating

    create = commands.add_parser("create", help="write a reference model as ONNX")
    creating.add_arguments(create)
    create.set_defaults(run=lambda options: print(creating.run(options)))
    pack = commands.add_parser("pack", help="turn text, arrays, tables or images into training shards")
    packing.add_arguments(pack)
    pack.set_defaults(run=lambda options: print(packing.run(options).describe()))

    inspect = commands.add_parser("inspect", help="say what a model holds and what of it trains")
    inspect.add_argument("model", metavar="MODEL", help="an .onnx file")
    inspect.add_argument("--weights", type=int, default=20, metavar="N", help="rows of the table of weights (20)")
    inspect.set_defaults(run=_inspect)

    plan = commands.add_parser(
        "plan",
        help="say who does what in a run, what it takes, and whether it fits; no GPU needed",
        usage="onward plan RUN.yaml [--section.field value ...] [--image FILE] [--memory-gb N] [--write FILE]",
        description="Plans a run for any number of processes, without starting them.",
    )
    plan.add_argument("file", metavar="RUN.yaml")
    plan.add_argument("--image", metavar="FILE", help="a picture of the plan, .svg or .png")
    plan.add_argument("--memory-gb", type=float, metavar="N", help="memory of one rank in GB, for the verdict")
    plan.add_argument("--write", metavar="FILE", help="the model with the plan in ONNX's multi-device annotations")
    plan.set_defaults(run=_plan)

    train = commands.add_parser(
        "train",
        help="train as a RUN.yaml says",
        usage="onward train RUN.yaml [--section.field value ...]",
        description="Trains as RUN.yaml says; any field can be given here as --section.field value.",
    )
    train.add_argument("file", metavar="RUN.yaml")
    train.set_defaults(run=_train)

    export = commands.add_parser("export", help="write a trained model from a checkpoint")
    export.add_argument(
        "model", metavar="MODEL", nargs="+", help="the .onnx file that was trained, or those of its pipeline stages"
    )
    export.add_argument("--checkpoint", metavar="DIR", help="a checkpoint, or a folder of them")
    export.add_argument("-o", "--output", metavar="FILE", help="where the trained model goes")
    export.add_argument("--optimize", action="store_true", help="fold constants and fuse what onnxscript can")
    export.add_argument("--quantize", choices=("fp16", "int8-dynamic", "int8-static"), help="in fewer bits")
    export.add_argument("--calibration-data", metavar="DIR", help="shards for int8-static")
    export.add_argument("--calibration-batch-size", type=int, default=8, metavar="N", help="samples a batch (8)")
    export.add_argument("--calibration-batches", type=int, default=16, metavar="N", help="batches at most (16)")
    export.add_argument("--training-graph", metavar="FILE", help="where loss and gradients go as an ONNX graph")
    export.add_argument("--optimizer-graph", metavar="FILE", help="where the weight update goes as an ONNX graph")
    export.add_argument("--train-step", metavar="FILE", help="where a whole training step goes as an ONNX graph")
    export.add_argument(
        "--training-info", metavar="FILE", help="where the model goes with its training as ONNX says it"
    )
    export.add_argument("--run", metavar="RUN.yaml", dest="run_file", help="loss and optimizer of these graphs")
    export.set_defaults(run=_export)
    return parser


def _inspect(options: argparse.Namespace) -> None:
    from onward.lowering.inspection import describe

    print(describe(options.model, weight_rows=options.weights))


def _plan(options: argparse.Namespace, rest: Sequence[str]) -> None:
    from onward.planning_command import plan

    fields = read_overrides(rest)
    print(plan(options.file, fields, image=options.image, memory_gb=options.memory_gb, write=options.write), end="")


def _train(options: argparse.Namespace, rest: Sequence[str]) -> None:
    # Of torch's store, which complains at length on every rank when another rank has ended; onward says why it did.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from onward.training_command import train

    train(options.file, read_overrides(rest))


def _export(options: argparse.Namespace) -> None:
    if options.training_graph or options.optimizer_graph or options.train_step or options.training_info:
        _export_graphs(options)
    elif options.run_file is not None:
        raise ParametersError(
            "--run goes with --training-graph, --optimizer-graph, --train-step or --training-info FILE; name one."
        )
    elif options.checkpoint is None or options.output is None:
        raise ParametersError(
            "give --checkpoint DIR and -o FILE for a trained model, or --run RUN.yaml with --training-graph, "
            "--optimizer-graph, --train-step or --training-info FILE for a graph to train with."
        )
    if options.output is not None:
        _export_trained(options)


def _export_graphs(options: argparse.Namespace) -> None:
    from onward.artifacts.run_graphs import export_graphs

    if options.run_file is None:
        raise ParametersError("training graphs need a loss and an optimizer; name them with --run RUN.yaml.")
    if options.output is not None and options.checkpoint is None:
        raise ParametersError("-o FILE, the trained model, needs --checkpoint DIR.")
    if len(options.model) > 1:
        raise ParametersError(f"training graphs are of one model; {len(options.model)} are given.")
    written = export_graphs(
        options.model[0],
        options.run_file,
        checkpoint=options.checkpoint,
        training_graph=options.training_graph,
        optimizer_graph=options.optimizer_graph,
        train_step=options.train_step,
        training_info=options.training_info,
        tell=print,
    )
    for path in written:
        print(f"wrote {path}")


def _export_trained(options: argparse.Namespace) -> None:
    from onward.artifacts.trained_model import export_checkpoint

    path = export_checkpoint(
        options.model,
        options.checkpoint,
        options.output,
        optimize=options.optimize,
        quantize=options.quantize,
        calibration_dir=options.calibration_data,
        calibration_batch_size=options.calibration_batch_size,
        calibration_batches=options.calibration_batches,
    )
    print(f"wrote {path}")


def read_overrides(arguments: Sequence[str]) -> dict[str, str]:
    """`--section.field value` and `--section.field=value` as a mapping.

    Raises:
        ParametersError: an argument is neither, or lacks its value.
    """
    overrides: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--") or "." not in name:
            raise ParametersError(f"{name!r} is not understood; fields are given as --section.field value.")
        name, equals, value = name[2:].partition("=")
        if not equals:
            if not rest:
                raise ParametersError(f"--{name} lacks its value; write --{name} VALUE.")
            value = rest.pop(0)
        overrides[name] = value
    return overrides


if __name__ == "__main__":
    sys.exit(main())
