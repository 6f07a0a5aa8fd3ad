"""`onward train`: its arguments, its first line; `training` does the work, `sweep` one run after the other."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from onward import __version__
from onward.commands.overrides import read_overrides
from onward.graph.reading.garbage_collection import importing
from onward.parallel.rendezvous.launcher import LAUNCHED_BY_US, is_first_rank
from onward.report.phases import Phases

USAGE = (
    "onward train RUN.yaml [--section.field value ...] [--sweep section.field=A,B ...] [--dry-run] [--quiet | --json] "
    "[--log-level LEVEL]"
)
DESCRIPTION = "Trains as RUN.yaml says; any field can be set here as --section.field value."

LEVELS = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run file and the options."""
    parser.add_argument("file", metavar="RUN.yaml")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="section.field=A,B,...",
        help="train once for each value, each run in its own folder under paths.output_dir, and print a table; "
        "several --sweep: each combination",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="read model and data, build everything, compute one update, report, and write no files",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true", help="print warnings and errors only, and the table of a sweep")
    shown.add_argument("--json", action="store_true", help="print every event as a line of JSON")
    parser.add_argument(
        "--log-level", choices=LEVELS, metavar="LEVEL", help="also log to stderr: debug, info, warning or error"
    )


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Trains as a RUN.yaml says.

    Raises:
        UserError: of any kind, each with what to do.
        Interrupted: a signal came, and the state is saved.
        SystemExit: with the exit code of the processes that were started here.
    """
    # Of torch's store, which complains at length on every rank when another rank has ended; onward says why it did.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    fields = read_overrides(rest, command="train")
    is_launched = LAUNCHED_BY_US in os.environ  # the launcher has printed the first line
    phases.end()
    phases.notify = _notify
    if options.quiet or options.json or not is_first_rank():
        phases = Phases.silent()
    elif not is_launched and not options.sweep:  # each run of a sweep prints its own
        _write(f"onward {__version__}   {options.file}")
    phases.begin("starting processes, each of which imports torch" if is_launched else "importing torch")
    if options.sweep:
        phases.begin(f"reading {options.file}")
        with importing():
            from onward.commands.sweep import sweep

        sweep(options, fields, phases)
        return
    with importing():
        from onward.commands.training import TrainOptions, train

    display: Literal["console", "json", "quiet"] = "quiet" if options.quiet else "json" if options.json else "console"
    train(options.file, fields, TrainOptions(display, options.dry_run, options.log_level), phases)


def _notify(text: str) -> None:
    _write(f"note   {text}")


def _write(line: str) -> None:
    with suppress(OSError, ValueError):  # a reader that left must not end the run from another thread
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
