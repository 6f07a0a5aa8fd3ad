"""`onward help`: a command, a section of RUN.yaml, or one field, explained."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence

from onward.report.phases import Phases

DESCRIPTION = "Explains a command, a section of RUN.yaml or one of its fields: onward help training.batch_size."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the name to explain."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="a command, section or section.field; default: all fields"
    )


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Prints the explanation.

    Raises:
        ParametersError: there is nothing of that name.
    """
    from onward.parameters.fields import explain, listing

    width = min(100, shutil.get_terminal_size().columns)
    print(listing(width) if options.name is None else explain(options.name, width), end="")
