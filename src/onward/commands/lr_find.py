"""`onward lr-find`: its arguments; `rate_search` does the work."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from onward.graph.reading.garbage_collection import importing
from onward.report.phases import Phases

USAGE = "onward lr-find RUN.yaml [--from RATE] [--to RATE] [--steps N] [--image FILE] [--section.field value ...]"
DESCRIPTION = (
    "Trains for a few steps while the learning rate rises, and suggests one (the range test of Smith, 2017). "
    "The run is not changed: no checkpoint, model or log is written, and none is read without --checkpoint."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run and the range."""
    parser.add_argument("file", metavar="RUN.yaml", help="the run")
    parser.add_argument("--from", dest="lowest", type=float, default=1e-7, metavar="RATE", help="first rate (1e-7)")
    parser.add_argument("--to", dest="highest", type=float, default=1.0, metavar="RATE", help="last rate (1)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="weight updates (100)")
    parser.add_argument("--image", metavar="FILE", help="write the curve to this .svg or .png file")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="start from the weights of a checkpoint (default: those of the model)"
    )


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Prints the table and the suggestion.

    Raises:
        UserError: of any kind, each with what to do.
    """
    from onward.commands.overrides import read_overrides

    with importing():
        from onward.commands.rate_search import find_rate

    print(
        find_rate(
            options.file,
            read_overrides(rest, command="lr-find"),
            lowest=options.lowest,
            highest=options.highest,
            updates=options.steps,
            image=options.image,
            checkpoint=options.checkpoint,
            phases=phases,
        )
    )
