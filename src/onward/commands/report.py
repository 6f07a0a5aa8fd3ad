"""`onward report`: one run, or several compared, as one self-contained HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from onward.graph.reading.garbage_collection import importing
from onward.report.phases import Phases

USAGE = "onward report RUN_FOLDER [RUN_FOLDER ...] [-o report.html]"
DESCRIPTION = (
    "Writes a self-contained HTML page: results, curves, the plan and its memory, the slowest nodes of a profile, "
    "settings, environment and notes; several runs are compared."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the folders and the page."""
    parser.add_argument("folders", metavar="RUN_FOLDER", nargs="+", help="output folders of runs")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the page (report.html in the first folder, or here for several)"
    )
    parser.add_argument("--no-plan", action="store_true", help="leave out the plan, which needs the model")


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Writes the page.

    Raises:
        UserError: a folder holds no run, a file of it is damaged, or the page cannot be written.
    """
    from onward.commands.overrides import read_overrides

    with importing():
        from onward.commands.reporting import write_report

    limits = read_overrides(rest, "limits")
    output = None if options.output is None else Path(options.output)
    folders = [Path(one) for one in options.folders]
    path = write_report(folders, output, phases, with_plan=not options.no_plan, overrides=limits)
    print(f"wrote {path}")
