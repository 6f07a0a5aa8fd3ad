"""`onward plan`: its arguments; `planning` does the work. Nothing of it needs a GPU or another process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from onward.commands.overrides import read_overrides
from onward.errors import ParametersError
from onward.graph.reading.garbage_collection import importing
from onward.report.phases import Phases

USAGE = (
    "onward plan RUN.yaml [--section.field value ...] [--image FILE] [--memory-gb N] [--write FILE] "
    "[--ranks N [--gpu NAME] [--nodes-of N] [--explain]] [--roofline [--gpu NAME]] | onward plan --calibrate"
)
DESCRIPTION = "Plans a run for any number of processes, without starting them, or finds the best layout for them."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run file and the options."""
    parser.add_argument("file", metavar="RUN.yaml", nargs="?")
    parser.add_argument("--image", metavar="FILE", help="write a picture of the plan to this .svg or .png file")
    parser.add_argument(
        "--memory-gb", type=float, metavar="N", help="memory of one rank in GB, to check whether the run fits"
    )
    parser.add_argument(
        "--write", metavar="FILE", help="write the model with the plan as ONNX multi-device annotations"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="find the layout in which so many processes are fastest, and print it"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="with --ranks, --roofline: for this GPU instead of this machine's: v100, t4, a100, l40s, h100, h200, b200",
    )
    parser.add_argument("--nodes-of", type=int, metavar="N", help="with --ranks: ranks of one machine")
    parser.add_argument(
        "--explain", action="store_true", help="with --ranks: print how the forecast is made up, and the rates used"
    )
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="print what limits each kind of operator on one device: matmuls, memory or starting kernels; and the MFU",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure matmuls, memory and communication on this machine, and keep the rates for later searches",
    )


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Prints the plan of a run.

    Raises:
        UserError: of any kind, each with what to do.
    """
    fields = read_overrides(rest, command="plan")
    if options.calibrate:
        with importing():
            from onward.commands.calibration import calibrate

        print(calibrate(phases), end="")
        return
    if options.file is None:
        raise ParametersError("name a RUN.yaml, or pass --calibrate.")
    with importing():
        from onward.commands.layout_search import LayoutOptions
        from onward.commands.planning import plan

    layout = LayoutOptions(ranks=options.ranks, gpu=options.gpu, nodes_of=options.nodes_of, explain=options.explain)
    text = plan(
        options.file,
        fields,
        image=options.image,
        memory_gb=options.memory_gb,
        write=options.write,
        layout=layout,
        roofline=options.roofline,
        phases=phases,
    )
    print(text, end="")
