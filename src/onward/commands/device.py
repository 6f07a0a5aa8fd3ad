"""`onward device`: a run as a folder that any ONNX Runtime trains with, and states of devices back into it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from onward.commands.overrides import read_overrides
from onward.errors import ParametersError
from onward.graph.reading.garbage_collection import importing
from onward.report.phases import Phases

USAGE = (
    "onward device RUN.yaml -o DIR [--checkpoint DIR] [--weights-inside] [--section.field value ...] | "
    "onward device RUN.yaml --device-state STATE [--section.field value ...] | "
    "onward device average STATE STATE ... -o STATE [--weights N,N,...] "
    "[--server FILE --before STATE --bundle DIR [--server-rate RATE]]"
)
DESCRIPTION = (
    "Writes a run as plain ONNX: loss, gradients, update, evaluation and inference as graphs over one file of weights, "
    "for browsers, phones and any ONNX Runtime. With --device-state, writes a checkpoint of the run from what a device "
    "saved, and onward train resumes from it. With average, merges states of several devices."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run, the folder, and what comes back from devices."""
    parser.add_argument("what", metavar="RUN.yaml", nargs="+", help="the run; or the word average, and states")
    parser.add_argument("-o", "--output", metavar="PATH", help="the folder of the bundle; of average, the merged state")
    parser.add_argument("--checkpoint", metavar="DIR", help="begin with the weights of a checkpoint, or of the latest")
    parser.add_argument(
        "--weights-inside",
        action="store_true",
        help="write the weights into the graphs' files, not into one they share",
    )
    parser.add_argument("--device-state", metavar="STATE", help="write a checkpoint from a state that a client saved")
    parser.add_argument("--weights", metavar="N,N,...", help="average: how much each state counts (all the same)")
    parser.add_argument("--server", metavar="FILE", help="average: update by FedAdam; its moments are kept in FILE")
    parser.add_argument(
        "--server-rate", type=float, default=0.01, metavar="RATE", help="learning rate of FedAdam (0.01)"
    )
    parser.add_argument("--before", metavar="STATE", help="with --server: the state that the devices began with")
    parser.add_argument("--bundle", metavar="DIR", help="with --server: the bundle that the states are of")


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Writes what was asked for.

    Raises:
        UserError: of any kind, each with what to do.
    """
    fields = read_overrides(rest, command="device")
    from onward.exclusive.lock import writing_to

    what, *states = options.what
    if what == "average" and states:
        _average(options, states, phases)
        return
    if states:
        raise ParametersError(f"onward device takes one RUN.yaml; {len(options.what)} files are given.")
    if options.device_state is not None:
        with importing():
            from onward.device.returning import write_checkpoint

        phases.begin(f"writing a checkpoint from {options.device_state}")
        write_checkpoint(what, options.device_state, overrides=fields, notify=print)
        return
    folder = _output(options, "DIR, the folder of the bundle")
    with importing():
        from onward.device.bundle import write_bundle

    phases.begin(f"writing {folder}")
    with writing_to(files=[folder]):
        write_bundle(
            what,
            folder,
            checkpoint=options.checkpoint,
            overrides=fields,
            weights_inside=options.weights_inside,
            notify=print,
        )
    print(f"wrote {folder}")


def _average(options: argparse.Namespace, states: Sequence[str], phases: Phases) -> None:
    with importing():
        from onward.device.device_states import FedAdam, average_files

    path = _output(options, "STATE, where the average goes")
    phases.begin(f"averaging {len(states)} states")
    average_files(
        states,
        path,
        weights=None if options.weights is None else _numbers(options.weights),
        before=options.before,
        server=options.server,
        bundle=options.bundle,
        optimizer=None if options.server is None else FedAdam(learning_rate=options.server_rate),
    )
    print(f"wrote {path}")


def _output(options: argparse.Namespace, what: str) -> Path:
    if options.output is None:
        raise ParametersError(f"-o is missing; pass -o {what}.")
    return Path(options.output)


def _numbers(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError as error:
        raise ParametersError(f"--weights is {text!r}; expected numbers like 100,250,80.") from error
