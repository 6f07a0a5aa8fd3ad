"""`onward inspect`: inputs, outputs, operators and weights of a model, and which weights are trainable."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from onward.graph.reading.garbage_collection import importing
from onward.report.phases import Phases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds model and data, and the length of the table of weights."""
    parser.add_argument("model", metavar="MODEL", help="an .onnx file")
    parser.add_argument("data", metavar="DATA", nargs="?", help="data, as for onward init")
    parser.add_argument("--weights", type=int, default=20, metavar="N", help="rows of the table of weights (20)")


def run(options: argparse.Namespace, rest: Sequence[str], phases: Phases) -> None:
    """Prints the description of a model.

    Raises:
        UserError: the model cannot be read.
    """
    from onward.commands.overrides import read_limits

    with importing():
        from onward.graph.training_graph import make_training_graph
        from onward.lowering.inspection import describe, why_not_lowered

    limits = read_limits(rest)
    phases.begin(f"inspecting {options.model}")
    training = make_training_graph(options.model, why_not_lowered=why_not_lowered, limits=limits)
    print(describe(options.model, weight_rows=options.weights, limits=limits, training=training), flush=True)
    with importing():
        from onward.proposal.summary import describe_proposal

    phases.begin("checking what `onward init` would propose")
    print(describe_proposal(options.model, options.data, limits, training))
