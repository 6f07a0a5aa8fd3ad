"""Forecast and measured order of layouts: `python -m benchmarks.layout_choice [--models gpt2 ...] [--world 2 4]`.

Meshes, stages of ZeRO and schedules train on CPU processes over Gloo, each with the micro-batch that is fastest by
the forecast. Every layout is built once, and all are trained a few updates in `--turns`, so that what else the machine
does meets all of them alike. Printed are the forecast of each, the median of its times and of the CPU seconds that the
cores need, and for each model and number of processes how well the orders agree and how far the chosen layout is from
the fastest one; `--split` adds what the seconds are made of. CPU time also says something on a busy machine, but not
how long ranks wait. Run `onward plan --calibrate` before; `--most 8 --turns 5 --updates 3` takes about 30 minutes on
two idle cores, `--models llama bert squeezenet gpt2_wide gpt2_many_words --most 5 --turns 4 --updates 2` about 14.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import pickle
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import torch
from tests.ranks import run_on_ranks
from torch.profiler import ProfilerActivity, profile

from benchmarks.quantized_base import Llama, build
from onward.engine.building.preparation import feature_ranges, plan_run, read_training_graph
from onward.engine.building.sizes import known_dimensions
from onward.engine.callbacks import Callback
from onward.engine.forecast.hardware_here import cluster_here
from onward.engine.forecast.network_work import count_network, search_settings
from onward.engine.forecast.performance import synthetic_loader
from onward.engine.reports import UpdateReport
from onward.environment import Environment
from onward.errors import ParametersError
from onward.models import create_model
from onward.operating_system import free_memory_bytes, usable_cores
from onward.parameters import Parameters
from onward.plan.search.choosing import OBVIOUS, choose_layout
from onward.plan.search.layout import Layout, layouts
from onward.plan.search.pricing import Estimate, Pricing
from onward.plan.topology import Topology
from onward.runner import TrainingRunner

SAMPLES = 32
"""Of an update."""
WAITING = ("pipeline bubble",)
"""Kinds of seconds in which a rank has nothing to do."""

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
    "llama": (
        lambda: build(Llama(layers=4, width=256, heads=8, key_heads=4, inner=512, vocabulary=4096), 128), TOKENS,
    ),
    "squeezenet": (
        lambda: create_model("squeezenet", image_size=64, channels=3, classes=10, dropout=0.0), TOKENS,
    ),
}  # fmt: skip

DIMENSIONS: Mapping[str, Mapping[str, int]] = {
    **{name: {"sequence": 128} for name in MODELS if name != "squeezenet"},
    "bert": {"sequence": 128, "masked": 20},
}


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


class _Updates(Callback):
    """When updates end, by the clock and in CPU seconds of this process, all of its threads together."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_update(self, report: UpdateReport) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def mean(self) -> tuple[float, float]:
        """Of an update, but for the first, which has no beginning; the next round begins anew."""
        ends, self.ends = np.array(self.ends), []
        wall, cpu = (ends[-1] - ends[0]) / (len(ends) - 1)
        return float(wall), float(cpu)


def train_in_turns(
    runs: Sequence[Parameters], threads: int, turns: int, is_split: bool
) -> tuple[list[list[tuple[float, float]]], list[dict[str, float]]]:
    """Every run is built once, then all are trained a round each, `turns` times; on one of the ranks that call this.

    Returns:
        For each run: seconds and CPU seconds of an update in each turn; and, if they are split, CPU seconds of an
        update by kind, under the profiler.
    """
    environment, built = Environment(execution_provider="CPU", threads=threads), []
    for parameters in runs:
        updates = _Updates()
        runner = TrainingRunner(parameters, environment, [updates], progress=False)
        runner.initialize()
        sizes, ranges = (
            known_dimensions(parameters.training, runner.graph, {}),
            feature_ranges(parameters.loss, runner.graph),
        )
        loader = synthetic_loader(parameters, runner.graph, sizes, ranges)
        runner.run(loader)  # the first updates allocate
        updates.mean()
        built.append((runner, loader, updates))
    found: list[list[tuple[float, float]]] = [[] for _ in runs]
    for _ in range(turns):
        for (runner, loader, updates), one in zip(built, found, strict=True):
            runner.run(loader)
            one.append(updates.mean())
    return found, [_by_kind(runner, loader) for runner, loader, _ in built] if is_split else [{} for _ in built]


def _by_kind(runner: TrainingRunner, loader: Any) -> dict[str, float]:
    """CPU seconds of an update in matmuls and convolutions, in collectives and in the rest; number of operators."""
    training = runner.parameters.training
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        runner.run(loader)
    updates = training.steps / training.gradient_accumulation_steps
    found = dict.fromkeys(("matmuls", "collectives", "rest", "operators"), 0.0)
    for event in profiled.key_averages():
        kind = "matmuls" if re.search(_MATMULS, event.key) else "rest"
        kind = "collectives" if re.match("gloo:|c10d::|nccl:", event.key) else kind
        found[kind] += event.self_cpu_time_total * 1e-6 / updates
        found["operators"] += (event.key.startswith("aten::")) * event.count / updates
    return found


_MATMULS = r"aten::(addmm|mm|bmm|baddbmm)$|convolution|attention"


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


def can_be_planned(parameters: Parameters, estimate: Estimate) -> bool:
    """Whether a plan carries a layout out: some schedules need gradients where a stage has none."""
    run = in_layout(parameters, estimate.layout, 1)
    try:
        plan_run(run, Topology.of_sizes(run.distributed), read_training_graph(run), {})
    except ParametersError as error:
        print(f"    {estimate.layout}: refused: {error}")
        return False
    return True


def signs(values: Sequence[float], noise: Sequence[float] | None = None) -> list[int]:
    """Of all pairs, which is larger: 1, -1, or 0 where the difference is within twice its standard error."""
    noise = [0.0] * len(values) if noise is None else noise
    pairs = itertools.combinations(zip(values, noise, strict=True), 2)
    return [((a > b) - (a < b)) * (abs(a - b) > 2 * math.hypot(e, f)) for (a, e), (b, f) in pairs]


def kendall_tau(left: Sequence[int], right: Sequence[int]) -> float:
    """Pairs in the same order less those in the other, as a share of those that are not equal in either (tau-b)."""
    unequal = math.prod(sum(sign != 0 for sign in side) for side in (left, right))
    return sum(one * other for one, other in zip(left, right, strict=True)) / math.sqrt(max(1, unequal))


def somers_d(forecast: Sequence[int], measured: Sequence[int]) -> float:
    """The same as a share of the pairs that the measurement can tell apart (Somers, 1962): its ties do not count."""
    both = sum(one * other for one, other in zip(forecast, measured, strict=True))
    return both / max(1, sum(sign != 0 for sign in measured))


def median_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Of repeated turns the median and its standard error, from the median absolute deviation (normal: 1.4826)."""
    median = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(one - median) for one in values)
    return median, 1.2533 * deviation / math.sqrt(len(values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A layout, by forecast and by measurement.

    Attributes:
        estimate: of the search.
        wall, busy: median of an update's seconds over turns, and its standard error: by the clock; and those that the
            cores need at least, the CPU seconds of the slowest rank or of all ranks over the cores.
        kinds: CPU seconds of all ranks by kind.
    """

    estimate: Estimate
    wall: tuple[float, float]
    busy: tuple[float, float]
    kinds: Mapping[str, float]

    @property
    def busy_forecast(self) -> float:
        """What is forecast without waiting for others."""
        return sum(seconds for kind, seconds in self.estimate.seconds.items() if kind not in WAITING)


def measure(
    parameters: Parameters, estimates: Sequence[Estimate], asked: argparse.Namespace, ranks: int
) -> list[Measured]:
    """Trains all layouts in turns."""
    cores = usable_cores()
    threads, runs = max(1, cores // ranks), [in_layout(parameters, one.layout, asked.updates) for one in estimates]
    with mock.patch("tests.ranks.LONGEST_SECONDS", 7200.0):
        of_ranks = run_on_ranks(ranks, train_in_turns, runs, threads, asked.turns, asked.split)
    found = []
    for place, estimate in enumerate(estimates):
        turns = np.array([times[place] for times, _ in of_ranks])  # rank, turn, wall and CPU
        busy = np.maximum(turns[:, :, 1].max(0), turns[:, :, 1].sum(0) / cores)
        kinds = [split[place] for _, split in of_ranks]
        found.append(
            Measured(
                estimate=estimate,
                wall=median_and_error(turns[:, :, 0].max(0).tolist()),
                busy=median_and_error(busy.tolist()),
                kinds={kind: sum(one[kind] for one in kinds) for kind in kinds[0]},
            )
        )
    return found


def compare(model: Path, sections: Mapping[str, Any], ranks: int, asked: argparse.Namespace) -> str:
    """Trains the layouts of a model; returns the line of the table."""
    parameters = parameters_of(model, sections)
    cluster = cluster_here(ranks, "CPU")
    memory = 0.9 * free_memory_bytes() / ranks
    settings = search_settings(parameters, read_training_graph(parameters), ranks, memory, torch.__version__)
    works = count_network(parameters, {}, ranks)
    chosen = choose_layout(works, cluster, settings).chosen
    estimates = evenly(tried([Pricing(work, cluster, settings) for work in works]), asked.most, chosen)
    estimates = [one for one in estimates if can_be_planned(parameters, one)]
    found = measure(parameters, estimates, asked, ranks)
    for one in sorted(found, key=lambda one: one.busy):
        print("    " + line_of(one), flush=True)
    if asked.keep is not None:
        asked.keep.joinpath(f"{model.parent.name}_{ranks}.pickle").write_bytes(pickle.dumps(found))
    place, cells = [one.layout for one in estimates].index(chosen.layout), []
    for kind in ("wall", "busy"):
        measured = [getattr(one, kind) for one in found]
        values, errors = zip(*measured, strict=True)
        forecast = [one.busy_forecast if kind == "busy" else one.estimate.total_seconds for one in found]
        told, seen = signs(forecast), signs(values, errors)
        times = values[place] / min(values)
        cells.append(f"{kendall_tau(told, signs(values)):.2f} | {somers_d(told, seen):.2f} | {times:.2f}")
    return f"| {model.parent.name} | {ranks} | {len(found)} | {' | '.join(cells)} |"


def line_of(one: Measured) -> str:
    """Forecast and measurement of a layout, and what both are made of."""
    parts = " ".join(f"{kind} {seconds * 1e3:.0f}" for kind, seconds in one.estimate.seconds.items() if seconds > 5e-4)
    kinds = " ".join(f"{kind} {n if kind == 'operators' else n * 1e3:.0f}" for kind, n in one.kinds.items())
    (wall, _), (busy, error) = one.wall, one.busy
    return (
        f"{one.estimate.layout!s:<78} forecast {one.estimate.total_seconds * 1e3:6.0f} ms, busy "
        f"{one.busy_forecast * 1e3:6.0f}; measured {wall * 1e3:6.0f}, busy {busy * 1e3:6.0f} +- {error * 1e3:3.0f} "
        f"| forecast: {parts}" + (f" | all ranks: {kinds}" if kinds else "")
    )


def evenly(estimates: Sequence[Estimate], most: int | None, chosen: Estimate) -> list[Estimate]:
    """At most so many of them, from the fastest to the slowest, and the chosen one and replicas alone in addition."""
    ordered = sorted(estimates, key=lambda one: one.total_seconds)
    more = [chosen, *(one for one in ordered if OBVIOUS["replicas only"](one.layout))]
    if most is not None and most < len(ordered):
        ordered = [ordered[round(place)] for place in np.linspace(0, len(ordered) - 1, most)]
    return list({one.layout: one for one in (*more, *ordered)}.values())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments.add_argument("--world", nargs="+", type=int, default=[2, 4])
    arguments.add_argument("--updates", type=int, default=4, help="of a round, the first of which is not measured")
    arguments.add_argument("--turns", type=int, default=7, help="how often each layout is trained")
    arguments.add_argument("--most", type=int, help="layouts of each model, evenly from the fastest to the slowest")
    arguments.add_argument("--split", action="store_true", help="profile a last round: matmuls, collectives, the rest")
    arguments.add_argument("--keep", type=Path, metavar="FOLDER", help="write what was measured there")
    asked = arguments.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks, name in itertools.product(asked.world, asked.models):
            make, sections = MODELS[name]
            path = Path(folder) / name / "model.onnx"
            path.parent.mkdir(exist_ok=True)
            ir.save(make(), path)
            print(f"{name} on {ranks} processes", flush=True)
            rows.append(compare(path, sections, ranks, asked))
    each = "tau-b | D | chosen, times the fastest"
    print(f"| model | processes | layouts | by the clock: {each} | by CPU time: {each} |")
    print("|---|---|---|" + "---|" * 6)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
