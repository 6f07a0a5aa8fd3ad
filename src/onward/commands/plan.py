"""`onward plan`: its arguments; `planning` does the work. Nothing of it needs a GPU or another process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from onward.commands.overrides import read_overrides
from onward.report.phases import Phases

USAGE = "onward plan RUN.yaml [--section.field value ...] [--image FILE] [--memory-gb N] [--write FILE]"
DESCRIPTION = "Plans a run for any number of processes, without starting them."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run file and the options."""
    parser.add_argument("file", metavar="RUN.yaml")
    parser.add_argument("--image", metavar="FILE", help="write a picture of the plan to this .svg or .png file")
    parser.add_argument(
        "--memory-gb", type=float, metavar="N", help="memory of one rank in GB, to check whether the run fits"
    )
    parser.add_argument(
        "--write", metavar="FILE", help="write the model with the plan as ONNX multi-device annotations"
    )


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Prints the plan of a run.

    Raises:
        UserError: of any kind, each with what to do.
    """
    from onward.commands.planning import plan

    fields = read_overrides(rest, command="plan")
    text = plan(
        options.file, fields, image=options.image, memory_gb=options.memory_gb, write=options.write, phases=phases
    )
    print(text, end="")
