"""Models that no test has, in many layouts: `python -m benchmarks.held_out_layouts [MODEL ...] [--layouts h2 p2 ...]`.

Each trains a few updates in each layout; kept in `results/held_out_layouts.json` is the largest relative difference of
a weight from one process, or why the run was refused. Runs that the file has are left out, so that a sweep that was cut
resumes; `--again` leaves out only those that were equal. `--collectives` counts what tensor parallelism communicates
for a layer, next to Megatron-LM, and `--page` writes `results/held_out_layouts.md` from the file.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir as ir
from tests.invariants.cases import Case
from tests.invariants.layouts import Layout, Result, tensor_difference, train
from tests.invariants.rank_pool import end_ranks
from torch.onnx._internal.exporter._errors import ConversionError

from benchmarks.held_out_exports import LOSS, MEGATRON, MIXTURES, MODELS, HeldOut
from benchmarks.held_out_page import page
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.plan.horizontal.local_graph import localize
from onward.plan.horizontal.planning import plan_horizontal

LAYOUTS = {
    "h2": Layout(1, 2, 1),
    "p2": Layout(1, 1, 2),
    "context 2": Layout(1, 1, 1, {"context_parallel_size": 2}),
    "expert 2": Layout(2, 1, 1, {"expert_parallel_size": 2}),
    "h4": Layout(1, 4, 1),
    **{f"2x2x2 ZeRO {stage}": Layout(2, 2, 2, {"zero_stage": stage}) for stage in (1, 2, 3)},
}
BOUND = 1e-4
"""Largest difference that counts as equal: of the elements of a weight, as a share of its largest."""
SECONDS = 420
"""A run that takes longer hangs."""
RESULTS = Path(__file__).parent / "results" / "held_out_layouts.json"

ADDED_UP = ("AllReduce", "Enter", "LayerNormOverRanks", "RMSNormOverRanks")
OPTIONS: dict[str, Any] = {"global_batch": 8, "updates": 3, "accumulation": 2}


class Hangs(Exception):
    """A run took too long."""


def collectives(held_out: HeldOut, layers: int, size: int) -> Counter[str]:
    """The collective operators of a rank's graph, as training computes it."""
    graph = make_training_graph(held_out.model(layers), loss=LossSpec(**LOSS), fuse=True)  # type: ignore[arg-type]
    shapes = {name: array.shape for name, array in held_out.data(4).items()}
    facts = find_value_facts(graph, {str(v.name): shapes[str(v.name)] for v in graph.model.graph.inputs})
    plan = plan_horizontal(graph, size, facts.shapes, facts.numbers, allow_whole_layers=True)
    nodes = localize(graph, plan, 0).model.graph
    return Counter(node.op_type for node in nodes if node.domain == "onward.parallel")


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises `Hangs` in what takes longer."""

    def end(*_: Any) -> None:
        raise Hangs

    signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


@cache
def exported_model(name: str) -> tuple[str, Case]:
    """The folder of a model's file, and the case."""
    held_out = MODELS[name]
    folder = tempfile.mkdtemp(prefix="held_out_")
    ir.save(held_out.model(), Path(folder) / "model.onnx")
    return folder, Case(held_out.model, LOSS, held_out.data)


@cache
def reference(name: str) -> Result:
    """What one process ends with."""
    folder, case = exported_model(name)
    return train(case, Layout(), **OPTIONS, folder=folder)


def outcome(name: str, layout: Layout) -> str:
    """The difference from one process, or the reason of a refusal."""
    if MODELS[name].labels is None and layout.data > 1:
        return "left out: the loss compares the samples of a batch"
    if "expert_parallel_size" in layout.distributed and name not in MIXTURES:
        return "left out: the model has no experts"
    try:
        with limited(SECONDS):
            folder, case = exported_model(name)
            expected = reference(name)
            found = train(case, layout, **OPTIONS, folder=folder)
    except Hangs:
        end_ranks()
        return f"HANGS: no end after {SECONDS} s"
    except ConversionError as error:
        return f"FAILS: torch exports no such model: {str(error).splitlines()[0]}"
    except AssertionError as error:  # of a rank, with its traceback
        last = str(error).strip().splitlines()[-1]
        refusal = re.match(r"onward\.errors\.(?!InternalError)\w+: (.*)", last)
        return f"refused: {refusal[1]}" if refusal else f"FAILS: {last}"
    difference = tensor_difference(found, expected, ("weights/",))
    return f"{'equal' if difference <= BOUND else 'DIFFERENT'} {difference:.0e}"


def sweep(models: list[str], layouts: list[str], again: bool) -> None:
    """Adds what is missing to the results, those of few ranks first."""
    for layout in layouts:
        for name in models:
            known = read_results()
            before = known["runs"].get(name, {}).get(layout)
            if before is not None and (not again or before.startswith(("equal", "left out"))):
                continue
            started = time.perf_counter()
            found = outcome(name, LAYOUTS[layout])
            known = read_results()
            known["runs"].setdefault(name, {})[layout] = found
            write_results(known)
            print(f"{name:<24}{layout:<14}{found} ({time.perf_counter() - started:.0f} s)", flush=True)
    end_ranks()


def read_results() -> dict[str, Any]:
    """All results so far."""
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}, "collectives": {}}
    return known


def write_results(known: dict[str, Any]) -> None:
    """Replaces the file at once."""
    draft = RESULTS.with_suffix(".draft")
    draft.write_text(json.dumps(known, indent=1) + "\n")
    draft.replace(RESULTS)


def count_collectives(models: list[str]) -> None:
    """Adds to the results what a layer communicates: forward, backward, and of rows in norms over ranks."""
    for name in models:
        try:
            one, two = (collectives(MODELS[name], layers, 2) for layers in (1, 2))
        except Exception as error:  # of any model, and the others are counted
            print(f"{name:<24}{type(error).__name__}: {error}", flush=True)
            continue
        added = {kind: two[kind] - one[kind] for kind in ADDED_UP}
        rows = 2 * (added["LayerNormOverRanks"] + added["RMSNormOverRanks"])
        known = read_results()
        known["collectives"][name] = [added["AllReduce"], added["Enter"], rows, MEGATRON.get(name)]
        write_results(known)
        print(f"{name:<24}{known['collectives'][name]}", flush=True)


def main() -> None:
    """Runs what is asked for, or writes the page."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    arguments.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    arguments.add_argument("--collectives", action="store_true")
    arguments.add_argument("--again", action="store_true")
    arguments.add_argument("--page", action="store_true")
    asked = arguments.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    models = asked.models or list(MODELS)
    if asked.page:
        RESULTS.with_suffix(".md").write_text(page(read_results(), list(LAYOUTS)))
    elif asked.collectives:
        count_collectives(models)
    else:
        sweep(models, asked.layouts, asked.again)


if __name__ == "__main__":
    main()
