"""Forecast and measured order of layouts: `python -m benchmarks.layout_choice [--models gpt2 ...] [--world 2 4]`.

Every mesh, stage of ZeRO and schedule is trained on CPU processes over Gloo, each with the micro-batch that is fastest
by the forecast, in `--turns`, so that what else the machine does meets all layouts alike. Printed are the forecast of
each, the median of its times and of the CPU time of its slowest process and, for each model and number of processes,
Kendall's tau of the forecast order with both, and how far the chosen layout is from the fastest one. CPU time also says
something on a busy machine, but not how long ranks of a pipeline wait. Run `onward plan --calibrate` before;
`--most 6 --turns 2` takes about 25 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from tests.invariants.rank_pool import call_on_ranks, end_ranks

from onward.engine.building.preparation import known_dimensions, label_ranges
from onward.engine.forecast.hardware_here import cluster_here
from onward.engine.forecast.network_work import count_network, search_settings
from onward.engine.forecast.performance import synthetic_loader
from onward.environment import Environment
from onward.models import create_model
from onward.operating_system import free_memory_bytes, usable_cores
from onward.parameters import Parameters
from onward.plan.search.choosing import choose_layout
from onward.plan.search.layout import Layout, layouts
from onward.plan.search.pricing import Estimate, Pricing
from onward.runner import TrainingRunner

SAMPLES = 32
"""Of an update."""

TOKENS = {"loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"}}
TRANSFORMER = {"size": "tiny", "dropout": 0.0, "vocab_size": 2048, "context_length": 128}
MODELS: Mapping[str, tuple[Callable[[], ir.Model], Mapping[str, Any]]] = {
    "gpt2_deep": (lambda: create_model("gpt2", **TRANSFORMER, layers=8, width=192, heads=4), TOKENS),
    "gpt2_wide": (lambda: create_model("gpt2", **TRANSFORMER, layers=2, width=512, heads=8), TOKENS),
    "gpt2_many_words": (
        lambda: create_model("gpt2", **{**TRANSFORMER, "vocab_size": 32768}, layers=2, width=128, heads=4), TOKENS,
    ),
    "bert": (
        lambda: create_model("bert", **TRANSFORMER, layers=4, width=256, heads=4), {"loss": {"type": "bert"}},
    ),
    "squeezenet": (
        lambda: create_model("squeezenet", image_size=64, channels=3, classes=10, dropout=0.0), TOKENS,
    ),
}  # fmt: skip

DIMENSIONS = {**{name: {"sequence": 128} for name in MODELS if "gpt2" in name}, "bert": {"sequence": 128, "masked": 20}}


def parameters_of(model: Path, sections: Mapping[str, Any]) -> Parameters:
    """A run of one process, before a layout is chosen."""
    training = {"batch_size": SAMPLES, "num_train_steps": 1, "skip_evaluation": True}
    return Parameters.from_mapping(
        {
            "paths": {"model_path": str(model)},
            "training": {**training, "mapped_dimensions": DIMENSIONS.get(model.parent.name, {})},
            "learning_rate": {"initial_lr": 1e-4},
            "optimizer": {"training_optimizer_name": "AdamW"},
            **sections,
        }
    )


def in_layout(parameters: Parameters, layout: Layout, updates: int) -> Parameters:
    """The run in a layout."""
    fields = layout.sections()
    fields["training"]["num_train_steps"] = updates * layout.micro_batches
    return dataclasses.replace(
        parameters, **{name: dataclasses.replace(getattr(parameters, name), **one) for name, one in fields.items()}
    )


def train_here(parameters: Parameters, threads: int) -> tuple[float, float]:
    """Seconds and CPU seconds of an update, on one of the ranks that call this; a first round is not measured."""
    environment = Environment(execution_provider="CPU", threads=threads)
    runner = TrainingRunner(parameters, environment, [], progress=False)
    runner.initialize()
    sizes = known_dimensions(parameters.training, runner.graph, {})
    ranges = label_ranges(parameters.loss, runner.graph)
    loader = synthetic_loader(parameters, runner.graph, sizes, ranges)
    runner.run(loader)
    started, began = time.process_time(), time.perf_counter()
    runner.run(loader)
    updates = parameters.training.steps / parameters.training.gradient_accumulation_steps
    return (time.perf_counter() - began) / updates, (time.process_time() - started) / updates


def tried(pricings: Sequence[Pricing]) -> list[Estimate]:
    """One layout of each kind: the fastest by the forecast of its micro-batches."""
    best: dict[tuple[Any, ...], Estimate] = {}
    for pricing in pricings:
        for layout in layouts(pricing.work, pricing.cluster, pricing.settings):
            found = pricing.estimate(layout)
            kind = dataclasses.replace(layout, batch_size=1, micro_batches=1)
            if found.fits and found.total_seconds < best.get(kind, found).total_seconds * 1.0001:  # type: ignore[call-overload]
                best[kind] = found  # type: ignore[index]
    return list(best.values())


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float:
    """Pairs in the same order less those in the other, as a share of those that are not equal in either (tau-b)."""
    pairs = itertools.combinations(zip(left, right, strict=True), 2)
    signs = [((a > b) - (a < b), (c > d) - (c < d)) for (a, c), (b, d) in pairs]
    unequal = math.prod(sum(sign != 0 for sign in side) for side in zip(*signs, strict=True))
    return sum(one * other for one, other in signs) / math.sqrt(max(1, unequal))


def compare(model: Path, sections: Mapping[str, Any], ranks: int, updates: int, turns: int, most: int | None) -> str:
    """Trains the layouts of a model; returns the line of the table."""
    parameters = parameters_of(model, sections)
    cluster = cluster_here(ranks, "CPU")
    settings = search_settings(parameters, ranks, 0.9 * free_memory_bytes() / ranks, torch.__version__)
    works = count_network(parameters, {}, ranks)
    chosen = choose_layout(works, cluster, settings).chosen
    estimates = tried([Pricing(work, cluster, settings) for work in works])[:most]
    if chosen.layout not in [one.layout for one in estimates]:
        estimates.append(chosen)
    threads, runs = max(1, usable_cores() // ranks), [in_layout(parameters, one.layout, updates) for one in estimates]
    found: list[list[tuple[float, float]]] = [[] for _ in runs]
    for one, run in itertools.islice(itertools.cycle(zip(found, runs, strict=True)), turns * len(runs)):
        of_ranks = call_on_ranks(ranks, train_here, run, threads)
        one.append((max(wall for wall, _ in of_ranks), max(cpu for _, cpu in of_ranks)))
    medians = [tuple(statistics.median(values) for values in zip(*one, strict=True)) for one in found]
    for estimate, (wall, cpu) in zip(estimates, medians, strict=True):
        seconds = f"forecast {estimate.total_seconds:7.3f} s, measured {wall:7.3f} s, {cpu:7.3f} CPU s"
        print(f"    {estimate.layout!s:<85} {seconds}", flush=True)
    place, cells = [one.layout for one in estimates].index(chosen.layout), []
    for measured in zip(*medians, strict=True):
        tau = kendall_tau([one.total_seconds for one in estimates], measured)
        cells.append(f"{tau:.2f} | {measured[place] / min(measured):.2f}")
    return f"| {model.parent.name} | {ranks} | {len(runs)} | {' | '.join(cells)} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments.add_argument("--world", nargs="+", type=int, default=[2, 4])
    arguments.add_argument("--updates", type=int, default=4, help="of a round, the second of which is measured")
    arguments.add_argument("--turns", type=int, default=2, help="how often each layout is trained")
    arguments.add_argument("--most", type=int, help="layouts of each model, for a trial")
    asked = arguments.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks, name in itertools.product(asked.world, asked.models):
            make, sections = MODELS[name]
            path = Path(folder) / name / "model.onnx"
            path.parent.mkdir(exist_ok=True)
            ir.save(make(), path)
            print(f"{name} on {ranks} processes", flush=True)
            rows.append(compare(path, sections, ranks, asked.updates, asked.turns, asked.most))
    end_ranks()
    print("| model | processes | layouts | Kendall's tau | chosen, times the fastest | tau of CPU time | chosen |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
