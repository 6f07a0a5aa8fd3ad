"""`onward train`: its arguments; `training` does the work."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from onward.commands.overrides import read_overrides

USAGE = "onward train RUN.yaml [--section.field value ...]"
DESCRIPTION = "Trains as RUN.yaml says; any field can be given here as --section.field value."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run file."""
    parser.add_argument("file", metavar="RUN.yaml")


def run(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Trains as a RUN.yaml says.

    Raises:
        UserError: of any kind, each with what to do.
        Interrupted: a signal came, and the state is saved.
        SystemExit: with the exit code of the processes that were started here.
    """
    # Of torch's store, which complains at length on every rank when another rank has ended; onward says why it did.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from onward.commands.training import train

    train(options.file, read_overrides(rest))
