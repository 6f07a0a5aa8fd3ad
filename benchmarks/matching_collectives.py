"""Do the collectives of a thousand ranks match? `python -m benchmarks.matching_collectives [--layouts NAME ...]`.

For each layout of 1,024 ranks, the run of every rank is recorded (`recorded_collectives`), ranks of equal places once,
and the queues of all ranks are worked off: every member of a group must ask for the same collective, sizes and element
types in the same order, every send must meet its receive, and nobody may wait for ever.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch

from benchmarks.recorded_collectives import Arrivals, Call, Post, Step, recording_rank
from onward.engine.building.preparation import (
    feature_ranges,
    plan_run,
    read_training_graph,
)
from onward.engine.building.sizes import input_sizes, known_dimensions
from onward.engine.forecast.performance import synthetic_loader
from onward.environment import Environment
from onward.graph.training_graph import TrainingGraph
from onward.lowering.building.shapes import find_value_facts
from onward.models import create_model
from onward.parameters import Parameters
from onward.plan.decision import Plan
from onward.plan.pipeline.schedules import rank_of_stage
from onward.plan.rank import plan_rank
from onward.plan.topology import Place, Topology
from onward.runner import TrainingRunner

TOKENS = 16
_MESH = ("data", "horizontal", "pipeline")

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"pipeline_schedule": "1F1B"},
    "zero1": {"pipeline_schedule": "1F1B", "zero_stage": 1},
    "zero3": {"pipeline_schedule": "1F1B", "zero_stage": 3},
    "tokens": {"pipeline_schedule": "1F1B", "zero_stage": 1, "sequence_parallel": True},
    "interleaved": {"pipeline_schedule": "Interleaved1F1B", "stages_per_rank": 2, "zero_stage": 1},
    "zbv": {"pipeline_schedule": "ZBVZeroBubble", "zero_stage": 1},
}
"""Name -> fields of `distributed`, next to the sizes."""


_Key = tuple[str, int]
"""Name of a group, and a rank in it."""


class CollectiveError(Exception):
    """Ranks ask for different things, or wait for ever."""


def parameters_of(
    folder: Path, sizes: tuple[int, int, int], fields: Mapping[str, Any], updates: int = 1, **model: int
) -> Parameters:
    """The run of a small GPT-2, which is written into the folder; `sizes` are data, tensor parallel, pipeline."""
    _, horizontal, pipeline = sizes
    options = {"layers": 2 * pipeline, "width": 8 * horizontal, "heads": horizontal, "vocab_size": 16 * horizontal}
    path = folder / "model.onnx"
    ir.save(create_model("gpt2", size="tiny", dropout=0.0, context_length=TOKENS, **{**options, **model}), path)
    mesh = {f"{name}_parallel_size": size for name, size in zip(_MESH, sizes, strict=True)}
    accumulation = max(2, pipeline)
    return Parameters.from_mapping(
        {
            "paths": {"model_path": str(path)},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {
                "batch_size": 2,
                "gradient_accumulation_steps": accumulation,
                "num_train_steps": updates * accumulation,
                "skip_evaluation": True,
                "mapped_dimensions": {"sequence": TOKENS},
            },
            "learning_rate": {"initial_lr": 0.1},
            "optimizer": {"training_optimizer_name": "AdamW"},
            "distributed": {**mesh, **fields},
        }
    )


def record_run(parameters: Parameters, topology: Topology, places: Iterable[Place]) -> dict[Place, tuple[Step, ...]]:
    """What the ranks at these places ask for, from the start of their run to its end."""
    graph = read_training_graph(parameters)
    plan = plan_run(parameters, topology, graph, {})
    dimensions, arrivals = known_dimensions(parameters.training, graph, {}), _arrivals(parameters, plan, graph)
    loader = synthetic_loader(parameters, graph, dimensions, feature_ranges(parameters.loss, graph))
    roles = {tuple(members): name for name, members in groups_of(topology)}

    def role(ranks: list[int]) -> str:
        return roles[tuple(ranks)]

    found = {}
    with mock.patch.multiple("onward.run", read_training_graph=lambda *_: graph, plan_run=lambda *_: plan):
        for place in places:
            with recording_rank(topology.rank(place), topology.world_size, arrivals[place.pipeline], role) as recording:
                runner = TrainingRunner(parameters, Environment(execution_provider="CPU", threads=1), progress=False)
                runner.initialize()
                runner.run(loader)
                found[place] = tuple(recording.steps)
    return found


def _arrivals(parameters: Parameters, plan: Plan, graph: TrainingGraph) -> list[Arrivals]:
    """For each rank of a pipeline what its stages receive."""
    size = plan.topology.pipeline_size
    if plan.stage_count == 1:
        return [()] * size
    rank = plan_rank(graph, plan, Place(0, 0, 0), indices=())
    assert rank.stages is not None
    sizes = input_sizes(rank.local, known_dimensions(parameters.training, graph, {}))
    shapes = find_value_facts(rank.local, sizes).shapes
    holder = [rank_of_stage(plan.schedule, size, stage) for stage in range(plan.stage_count)]
    return [
        [
            [torch.ones(shapes[one.name]) for one in stage.received]
            for before, stage in zip(holder, rank.stages.stages[1:], strict=False)
            if holder[stage.index] == place != before
        ]
        for place in range(size)
    ]


def groups_of(topology: Topology) -> list[tuple[str, list[int]]]:
    """Name and ranks of all groups of a mesh; those of one rank are left out."""
    found: dict[tuple[str, Place], list[int]] = {}
    for rank in range(topology.world_size):
        place = topology.place(rank)
        for name in _MESH:
            found.setdefault((name, replace(place, **{name: 0})), []).append(rank)
    return [
        *((name, members) for (name, _), members in found.items() if len(members) > 1),
        ("control", list(range(topology.world_size))),
    ]


def match_programs(programs: Sequence[Sequence[Step]], groups: Iterable[tuple[str, list[int]]]) -> int:
    """Works off the queues of all ranks; returns how many collectives and transfers met.

    Args:
        programs: of every rank.
        groups: name and ranks of each.

    Raises:
        CollectiveError: ranks of a group ask for different things, or wait for ever.
    """
    return _Queues(programs, groups).run()


class _Queues:
    """The ranks of a run, each at a step of its own, and what they have asked for in each group."""

    def __init__(self, programs: Sequence[Sequence[Step]], groups: Iterable[tuple[str, list[int]]]) -> None:
        self.programs, self.met = programs, 0
        self.members = {(name, rank): members for name, members in groups for rank in members}
        self.queues: dict[_Key, deque[tuple[int, list[Call]]]] = {key: deque() for key in self.members}
        self.at, self.posts = [0] * len(programs), [0] * len(programs)
        self.done: list[set[int]] = [set() for _ in programs]
        self.runnable = deque(range(len(programs)))
        self.changed: deque[_Key] = deque()

    def run(self) -> int:
        """See `match_programs`."""
        while self.runnable:
            self._run_rank(self.runnable.popleft())
            while self.changed:
                self._try_head(self.changed.popleft())
        stuck = sum(at < len(program) for at, program in zip(self.at, self.programs, strict=True))
        left: dict[Call, list[int]] = {}
        for (_, rank), queue in self.queues.items():
            if queue:
                left.setdefault(queue[0][1][0], []).append(rank)
        if stuck or left:
            waits = "; ".join(f"{call} (rank {ranks[0]}, {len(ranks)} in all)" for call, ranks in left.items())
            raise CollectiveError(f"{stuck} of {len(self.programs)} ranks wait for ever for: {waits}.")
        return self.met

    def _run_rank(self, rank: int) -> None:
        """Until it waits for what is not complete."""
        program = self.programs[rank]
        while self.at[rank] < len(program):
            step = program[self.at[rank]]
            if isinstance(step, Post):
                key = (step.calls[0].group, rank)
                self.queues[key].append((self.posts[rank], list(step.calls)))
                self.posts[rank] += 1
                self.changed.append(key)
            elif step.post not in self.done[rank]:
                return
            self.at[rank] += 1

    def _try_head(self, key: _Key) -> None:
        """Completes what the first post in a rank's queue completes, if anything."""
        name, rank = key
        if not self.queues[key]:
            return
        calls, members = self.queues[key][0][1], self.members[key]
        if calls[0].kind in ("send", "recv"):
            for call in list(calls):
                self._try_transfer(name, rank, call)
            if not calls:
                self._complete(key)
            return
        heads = [self.queues[name, one] for one in members]
        if not all(heads):
            return
        for other, head in zip(members, heads, strict=True):
            if head[0][1] != calls:
                raise CollectiveError(f"rank {rank} asks for {calls[0]}, rank {other} for {head[0][1][0]}.")
        for other in members:
            self._complete((name, other))

    def _try_transfer(self, name: str, rank: int, call: Call) -> None:
        """A send or a receive meets its counterpart if that is in the first post of the other rank."""
        members = self.members[name, rank]
        peer, own = members[call.peer], members.index(rank)
        queue = self.queues[name, peer]
        wanted = ("recv" if call.kind == "send" else "send", own)
        match = next((one for one in (queue[0][1] if queue else ()) if (one.kind, one.peer) == wanted), None)
        if match is None:
            return
        if match.tensors != call.tensors:
            raise CollectiveError(f"rank {rank} asks for {call}, rank {peer} for {match}.")
        self.queues[name, rank][0][1].remove(call)
        queue[0][1].remove(match)
        if not queue[0][1]:
            self._complete((name, peer))

    def _complete(self, key: _Key) -> None:
        """The first post of a rank's queue."""
        self.done[key[1]].add(self.queues[key].popleft()[0])
        self.met += 1
        self.changed.append(key)
        self.runnable.append(key[1])


def record_all(parameters: Parameters) -> tuple[Topology, list[tuple[Step, ...]], int]:
    """The mesh, what every rank asks for, and how many ranks were recorded.

    Of the replicas the first and the last are: the others hold shards of the sizes between, and are taken to ask for
    what the last does. Tensor-parallel ranks and ranks of a pipeline are all recorded.
    """
    sizes = parameters.distributed
    topology = Topology.of_sizes(sizes)
    last, everywhere = topology.data_size - 1, [topology.place(rank) for rank in range(topology.world_size)]
    found = record_run(parameters, topology, [place for place in everywhere if place.data in (0, last)])
    return topology, [found[replace(place, data=last if place.data else 0)] for place in everywhere], len(found)


def check_layout(sizes: tuple[int, int, int], fields: Mapping[str, Any]) -> str:
    """Records and matches the ranks of a layout; returns the rest of the line of the table."""
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        topology, programs, count = record_all(parameters_of(Path(folder), sizes, fields))
    recorded = time.process_time()
    met = match_programs(programs, groups_of(topology))
    seconds = (recorded - started, time.process_time() - recorded)
    calls = sum(len(step.calls) for one in programs for step in one if isinstance(step, Post))
    return f"{count} | {len(set(programs))} | {calls:,} | {met:,} | {seconds[0]:.0f} + {seconds[1]:.0f}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    arguments.add_argument("--sizes", nargs=3, type=int, default=(16, 8, 8), help="data, tensor parallel, pipeline")
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| layout | recorded | different programs | calls of all ranks | completed posts | CPU s: record + match |")
    print("|---|---|---|---|---|---|")
    for name in asked.layouts:
        print(f"| {name} | {check_layout(tuple(asked.sizes), LAYOUTS[name])} |", flush=True)


if __name__ == "__main__":
    main()
