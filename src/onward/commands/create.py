"""`onward create`: a reference model from the command line to a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from onward.report.phases import Phases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a subcommand for each reference model."""
    from onward.models.create import add_arguments as add

    add(parser)


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Writes the model and prints what was written.

    Raises:
        UserError: an option is impossible, or the file cannot be written.
    """
    from onward.models import create

    phases.begin(f"writing {options.output}")
    print(create.run(options))
