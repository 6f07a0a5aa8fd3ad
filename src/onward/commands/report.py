"""`onward report`: one run, or several compared, as one self-contained HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

USAGE = "onward report RUN_FOLDER [RUN_FOLDER ...] [-o report.html]"
DESCRIPTION = (
    "Writes an HTML page that needs no network and no other file: results, curves, the plan with its memory, the "
    "slowest nodes of a profile, settings, environment and notes; of several runs, compared."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the folders and the page."""
    parser.add_argument("folders", metavar="RUN_FOLDER", nargs="+", help="output folders of runs")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the page (report.html in the first folder, or here for several)"
    )
    parser.add_argument("--no-plan", action="store_true", help="do not plan the run again, which reads its model")


def run(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Writes the page.

    Raises:
        UserError: a folder holds no run, a file of it is damaged, or the page cannot be written.
    """
    from onward.commands.reporting import write_report

    output = None if options.output is None else Path(options.output)
    path = write_report([Path(folder) for folder in options.folders], output, with_plan=not options.no_plan)
    print(f"wrote {path}")
