"""Whether what all ranks of a run ask of each other meets, on recordings of 32 ranks; and that a mistake is found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from benchmarks.matching_collectives import CollectiveError, groups_of, match_programs, parameters_of, record_all
from benchmarks.recorded_collectives import Call, Post, Step, Wait

from onward.plan.topology import Topology

Programs = list[tuple[Step, ...]]
LAYOUT = {"pipeline_schedule": "Interleaved1F1B", "stages_per_rank": 2, "zero_stage": 3, "sequence_parallel": True}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Topology, Programs]:
    topology, programs, count = record_all(parameters_of(tmp_path_factory.mktemp("gpt2"), (8, 2, 2), LAYOUT))
    assert (topology.world_size, count) == (32, 8)
    return topology, programs


def test_collectives_and_transfers_of_all_ranks_meet(recorded: tuple[Topology, Programs]) -> None:
    topology, programs = recorded
    posts = [step for program in programs for step in program if isinstance(step, Post)]
    assert match_programs(programs, groups_of(topology)) == len(posts)
    assert {call.group for post in posts for call in post.calls} == {"data", "horizontal", "pipeline", "control"}
    assert {call.kind for post in posts for call in post.calls} >= {
        "all_reduce", "all_gather_single", "reduce_scatter_single", "send", "recv", "broadcast"
    }  # fmt: skip


def first_of(program: Sequence[Step], kind: str) -> tuple[int, Call]:
    """The first call of a kind, and the number of its step."""
    posts = ((at, step.calls[0]) for at, step in enumerate(program) if isinstance(step, Post))
    return next((at, call) for at, call in posts if call.kind == kind)


def larger(program: tuple[Step, ...]) -> tuple[Step, ...]:
    """With one tensor of another size."""
    at, call = first_of(program, "all_gather_single")
    shape, dtype = call.tensors[0]
    wrong = replace(call, tensors=(((shape[0] + 1, *shape[1:]), dtype),))
    return (*program[:at], Post((wrong,)), *program[at + 1 :])


def turned(program: tuple[Step, ...]) -> tuple[Step, ...]:
    """With two posts in the other order."""
    (first, _), (second, _) = (first_of(program, kind) for kind in ("all_gather_single", "reduce_scatter_single"))
    found = list(program)
    found[first], found[second] = found[second], found[first]
    return tuple(found)


def shorter(program: tuple[Step, ...]) -> tuple[Step, ...]:
    """Without its last post."""
    at = max(at for at, step in enumerate(program) if isinstance(step, Post))
    return program[:at]


def misdirected(program: tuple[Step, ...]) -> tuple[Step, ...]:
    """With a tensor that is sent to the rank itself."""
    at, call = first_of(program, "send")
    return (*program[:at], Post((replace(call, peer=0),)), *program[at + 1 :])


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (larger, r"rank \d+ asks for all_gather_single \[\d+\] float32 on data, rank \d+ for all_gather_single"),
        (turned, r"asks for all_gather_single .* on data, rank \d+ for reduce_scatter_single .* AVG on data\."),
        (shorter, r"31 of 32 ranks wait for ever for: all_"),
        (
            misdirected,
            r"32 of 32 ranks wait for ever for: .*; send \[1, 10\] int64 on pipeline with 0 \(rank 6, 1 in all\)",
        ),
    ],
)
def test_a_planted_mistake_of_one_rank_is_found(
    recorded: tuple[Topology, Programs], plant: object, message: str
) -> None:
    topology, programs = recorded
    wrong = [plant(one) if rank == 6 else one for rank, one in enumerate(programs)]  # type: ignore[operator]
    with pytest.raises(CollectiveError) as raised:
        match_programs(wrong, groups_of(topology))
    assert re.search(message, str(raised.value)), str(raised.value)


def test_two_ranks_that_receive_first_wait_for_ever(recorded: tuple[Topology, Programs]) -> None:
    """As NCCL has it, a receive on its own stands before the send that follows it; of one batch they meet."""
    _, programs = recorded
    _, call = first_of(programs[0], "send")

    def exchange(peer: int) -> tuple[Post, Post]:
        return Post((replace(call, kind="recv", peer=peer),)), Post((replace(call, peer=peer),))

    groups = [("pipeline", [0, 1])]
    one_by_one = [(*exchange(1 - rank), Wait(0), Wait(1)) for rank in (0, 1)]
    with pytest.raises(CollectiveError, match="2 of 2 ranks wait for ever"):
        match_programs(one_by_one, groups)
    assert match_programs([(Post(sum((p.calls for p in exchange(1 - r)), ())), Wait(0)) for r in (0, 1)], groups) == 2
