"""`onward reference`: its arguments; `reference_shards` does the work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from onward.graph.reading.garbage_collection import importing
from onward.report.phases import Phases

USAGE = "onward reference RUN.yaml DEST [--section.field value ...]"
DESCRIPTION = (
    "Computes the log-probabilities that the reference of a run with loss.type dpo gives to the answers of its data, "
    "once, and writes the shards with them. Trained on these, a run computes no reference."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run and the destination."""
    parser.add_argument("file", metavar="RUN.yaml", help="the run")
    parser.add_argument("dest", metavar="DEST", help="directory for the shards; with test data of train and test")


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Prints where the shards are, and what to set.

    Raises:
        UserError: of any kind, each with what to do.
    """
    from onward.commands.overrides import read_overrides

    with importing():
        from onward.commands.reference_shards import add_reference

    print(add_reference(options.file, options.dest, read_overrides(rest, command="reference"), phases))
