"""`onward pack`: text, arrays, tables, images or recordings into training shards."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from onward.report.phases import Phases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds source, destination and the options of every kind of source."""
    from onward.data.packing.command import add_arguments as add

    add(parser)


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Packs and prints a summary.

    Raises:
        UserError: the source cannot be packed as asked.
    """
    from onward.commands.overrides import read_limits
    from onward.data.packing import command

    phases.begin(f"packing {options.source}")
    print(command.run(options, read_limits(rest), phases.begin).describe())
