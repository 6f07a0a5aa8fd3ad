"""What the ranks of entire runs exchange for an update is what `onward plan` says: the same calls, the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.forecast.plan_forecast import forecast
from onward.parameters import Parameters
from onward.plan.memory import Forecast, Traffic
from onward.plan.topology import Topology
from tests.invariants.exchanges import ACCUMULATION, MESSAGE, Calls, data_of, of_one_update, sections_of
from tests.invariants.layouts import Layout
from tests.invariants.rank_pool import end_ranks

Totals = dict[str, tuple[float, float]]
"""Exchange of the backend -> calls, bytes of the full tensors."""
SENT = {
    "activations to the next stage", "gradients to the previous stage", "gradients of tied weights",
    "gradients (Adasum)",
}  # fmt: skip
LAYOUTS = [
    Layout(2, 1, 1, {"zero_stage": 3}),
    Layout(1, 1, 2),
    Layout(2, 1, 1, {"sync_every_updates": 1}),
]
MORE = [
    Layout(2, 1, 1, {"reduction_type": "bf16"}),
    Layout(2, 1, 1, {"enable_adasum": True}),
    Layout(1, 2, 1, {"sequence_parallel": True}),
    Layout(2, 2, 1, {"zero_stage": 2}),
    Layout(2, 1, 2, {"zero_stage": 1}),
    Layout(4, 1, 1, {"zero_stage": 3, "zero_group_size": 2}),
    Layout(4, 1, 1, {"zero_stage": 2, "zero_group_size": 2, "sync_every_updates": 1}),
    Layout(4, 1, 1, {"replicas_per_worker": 2, "sync_every_updates": 1}),
]


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def planned(folder: Path, layout: Layout) -> Forecast:
    """As `onward plan` does it: on this process alone."""
    parameters = Parameters.from_mapping(sections_of(folder, layout, 4))
    graph = read_training_graph(parameters, parameters.paths.model_path)
    specs = InMemoryDataLoader(data_of(4)).feature_specs()
    topology = Topology.of_sizes(parameters.distributed)
    return forecast(parameters, graph, plan_run(parameters, topology, graph, specs), specs)


def as_gloo_does(traffic: Sequence[Traffic]) -> Totals:
    """Gloo shares out by all-reduces, of which each rank keeps its part; along an axis by one for every part."""
    found: dict[str, tuple[float, float]] = {}
    for one in traffic:
        kind = "send" if one.what in SENT else "all_gather" if "gather" in one.what else "all_reduce"
        times = one.ranks if one.what == "tensor-parallel reduce-scatter" else 1
        calls, payload = found.get(kind, (0.0, 0.0))
        found[kind] = calls + times * one.calls, payload + one.payload
    return found


def as_heard(calls: Calls, layout: Layout) -> Totals:
    """Without what every update needs whatever the network: single numbers, and how to continue."""
    count, payload = Counter[str](), Counter[str]()
    for (kind, elements, width), times in calls.items():
        if elements <= ACCUMULATION or kind == "recv" or (kind, elements, width) == ("all_reduce", MESSAGE, 8):
            continue
        # Every replica, or every tensor-parallel rank, gives its part of what is gathered.
        parts = (
            max(layout.distributed.get("zero_group_size", layout.data), layout.horizontal)
            if kind == "all_gather"
            else 1
        )
        count[kind] += times
        payload[kind] += times * elements * width * parts
    return {kind: (count[kind], payload[kind]) for kind in count}


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)], ids=str)
def test_ranks_exchange_what_the_plan_says(tmp_path: Path, layout: Layout) -> None:
    said = planned(tmp_path, layout)
    per_place = layout.data * layout.horizontal
    for rank, (calls, _) in enumerate(of_one_update(tmp_path, layout)):
        forecast_of_rank = said.ranks[rank // per_place]
        assert as_heard(calls, layout) == as_gloo_does(forecast_of_rank.traffic), f"rank {rank}"
