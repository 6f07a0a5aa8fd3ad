"""A run in any layout follows the run of one process on the union of the batches: losses, norms, weights, statistics.

A covering set: five models on 2, 4 and 8 ranks, and every option of the engines at least once. The widest set is
`benchmarks/layouts.py`. All that differs is the order of sums: a rounding error of 2^-24 = 6e-8 (in 64 bits, of the
convolutional networks, 1e-16) a step and number.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from onward.parallel.pipeline.pipeline import knows_gradients
from tests.invariants.cases import CASES, gpt2_of_three_heads
from tests.invariants.layouts import Layout, Result, assert_follows, train
from tests.invariants.rank_pool import end_ranks

BOUNDS = {"32": (1e-6, 5e-6), "64": (1e-6, 1e-10)}
"""Of losses (which are reported in fp32) and weights, relative."""

CLIPPING = {"optimizer": {"max_norm_clip": 0.1}}
LAMB = {"optimizer": {"training_optimizer_name": "Lamb", "optimizer_attributes": [{"lambda": 0.1, "epsilon": 1e-4}]}}
RECOMPUTE = {"recompute": {"segments": True}}
Sections = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


@functools.cache
def one_process(name: str, accumulation: int, sections: str) -> Result:
    return train(CASES[name], Layout(), accumulation=accumulation, sections=json.loads(sections))


def layout(data: int, horizontal: int, pipeline: int, **distributed: Any) -> Layout:
    return Layout(data, horizontal, pipeline, distributed)


def follows(name: str, spread: Layout, accumulation: int = 1, sections: Sections | None = None) -> None:
    expected = one_process(name, accumulation, json.dumps(sections or {}))
    actual = train(CASES[name], spread, accumulation=accumulation, sections=sections)
    assert_follows(actual, expected, *BOUNDS["64" if name.endswith("64") else "32"])
    assert actual.norms == pytest.approx(expected.norms, rel=1e-5)


BATCH_NORM = {"synchronize_batch_norm": True}
ON_TWO = [
    ("gpt2", layout(2, 1, 1, zero_stage=0), 2, CLIPPING),
    ("gpt2", layout(2, 1, 1, zero_stage=1), 2, CLIPPING),
    ("gpt2", layout(2, 1, 1, zero_stage=2), 2, LAMB),
    ("gpt2", layout(2, 1, 1, zero_stage=3), 2, LAMB),
    ("gpt2", layout(2, 1, 1, zero_stage=3), 1, RECOMPUTE),
    ("gpt2", layout(1, 2, 1), 1, RECOMPUTE),
    ("gpt2", layout(1, 2, 1), 2, LAMB),
    ("gpt2", layout(1, 2, 1, sequence_parallel=True), 2, CLIPPING),
    ("gpt2", layout(1, 1, 1, context_parallel_size=2, zero_stage=1), 2, CLIPPING),
    ("gpt2_of_many_words", layout(1, 1, 1, context_parallel_size=2), 1, RECOMPUTE),
    ("gpt2_of_weighted_classes", layout(1, 1, 1, context_parallel_size=2), 2, CLIPPING),
    ("gpt2", layout(1, 1, 2), 2, LAMB),
    ("gpt2", layout(1, 1, 2, pipeline_schedule="GPipe"), 2, RECOMPUTE),
    ("bert", layout(2, 1, 1, zero_stage=2), 2, {}),
    ("bert", layout(1, 2, 1), 1, LAMB),
    ("bert", layout(1, 1, 1, context_parallel_size=2, zero_stage=3), 2, LAMB),
    ("bert", layout(1, 1, 2), 2, CLIPPING),
    ("squeezenet_64", layout(2, 1, 1, zero_stage=3), 1, {}),
    ("squeezenet_64", layout(1, 2, 1), 1, {}),
    ("squeezenet_64", layout(1, 1, 2), 2, LAMB),
    ("u_net_64", layout(2, 1, 1, **BATCH_NORM), 2, {}),
    ("u_net_64", layout(2, 1, 1, zero_stage=3, **BATCH_NORM), 1, RECOMPUTE),
    ("u_net_64", layout(1, 2, 1), 1, {}),
    ("u_net_64", layout(1, 1, 2), 2, LAMB),
    ("tied_words", layout(2, 1, 1, zero_stage=1), 1, LAMB),
    ("tied_words", layout(2, 1, 1, zero_stage=3), 2, CLIPPING),
    ("tied_words", layout(1, 2, 1), 2, LAMB),
    ("tied_words", layout(1, 1, 2), 2, RECOMPUTE),
    ("mixtures", layout(1, 2, 1), 1, CLIPPING),
    ("one_key_head", layout(1, 2, 1), 2, LAMB),
    ("mixtures", layout(2, 1, 1, expert_parallel_size=2), 2, LAMB),
    ("mixtures", layout(2, 1, 1, expert_parallel_size=2, zero_stage=3), 2, CLIPPING),
    ("slots", layout(2, 1, 1, expert_parallel_size=2), 2, CLIPPING),
    ("slots", layout(1, 2, 1), 1, LAMB),
    ("spelled_words", layout(2, 1, 1, zero_stage=1), 2, CLIPPING),
    ("spelled_words", layout(1, 2, 1), 1, {}),
    ("spelled_words", layout(1, 1, 2), 2, RECOMPUTE),
]
ON_FOUR = [
    ("gpt2", layout(2, 2, 1, zero_stage=3), 1, LAMB),
    ("gpt2", layout(2, 1, 2, zero_stage=2), 2, CLIPPING),
    ("gpt2", layout(1, 2, 2), 2, LAMB),
    ("gpt2", layout(1, 4, 1), 1, CLIPPING),
    ("gpt2", layout(1, 1, 1, context_parallel_size=4, zero_stage=2), 1, CLIPPING),
    ("gpt2", layout(2, 1, 1, context_parallel_size=2, zero_stage=3), 2, LAMB),
    ("gpt2", layout(1, 2, 1, context_parallel_size=2), 1, RECOMPUTE),
    ("gpt2", layout(1, 2, 1, context_parallel_size=2, sequence_parallel=True), 2, CLIPPING),
    ("gpt2", layout(1, 1, 2, context_parallel_size=2), 2, LAMB),
    ("bert", layout(1, 2, 1, context_parallel_size=2), 2, {}),
    ("bert", layout(4, 1, 1, zero_stage=3), 1, LAMB),
    ("gpt2", layout(4, 1, 1, zero_stage=3, zero_group_size=2), 2, LAMB),
    ("tied_words", layout(4, 1, 1, zero_stage=2, zero_group_size=2), 3, CLIPPING),
    ("bert", layout(2, 1, 1, zero_stage=1, zero_group_size=2, context_parallel_size=2), 2, RECOMPUTE),
    ("bert", layout(2, 1, 2), 2, {}),
    ("bert", layout(2, 2, 1, zero_stage=1), 1, {}),
    ("squeezenet_64", layout(2, 2, 1), 1, RECOMPUTE),
    ("u_net_64", layout(2, 1, 2, **BATCH_NORM), 2, {}),
    ("one_key_head", layout(2, 2, 1, zero_stage=3), 2, CLIPPING),
    ("two_key_heads", layout(1, 4, 1), 2, LAMB),
    ("mixtures", layout(4, 1, 1, expert_parallel_size=4), 1, CLIPPING),
    ("mixtures", layout(4, 1, 1, expert_parallel_size=2, zero_stage=1), 2, LAMB),
    ("mixtures", layout(2, 2, 1, expert_parallel_size=2), 1, CLIPPING),
    ("slots", layout(2, 2, 1, expert_parallel_size=2), 2, LAMB),
    ("mixtures", layout(2, 1, 2, expert_parallel_size=2, zero_stage=1), 2, RECOMPUTE),
    ("tied_words", layout(4, 1, 1, zero_stage=2), 1, LAMB),
    ("tied_words", layout(2, 2, 1, zero_stage=3), 2, CLIPPING),
]
ON_EIGHT = [
    ("gpt2", layout(2, 2, 2, zero_stage=0), 2, CLIPPING),
    ("gpt2", layout(2, 2, 2, zero_stage=2), 2, LAMB),
    ("bert", layout(2, 2, 2, zero_stage=3), 2, RECOMPUTE),
    ("gpt2", layout(2, 2, 1, context_parallel_size=2, zero_stage=3), 2, LAMB),
    ("gpt2", layout(1, 2, 2, context_parallel_size=2), 2, CLIPPING),
    ("mixtures", layout(2, 2, 2, expert_parallel_size=2, zero_stage=1), 2, CLIPPING),
    ("tied_words", layout(2, 2, 2, zero_stage=3), 2, CLIPPING),
]
SCHEDULES = ["GPipe", "Interleaved1F1B"]
if knows_gradients(torch.__version__):
    SCHEDULES += ["InterleavedZeroBubble", "ZBVZeroBubble"]


def name_of(run: tuple[str, Layout, int, Sections]) -> str:
    name, spread, accumulation, sections = run
    return f"{name} {spread} accumulation {accumulation} {' '.join(map(str, sections))}"


@pytest.mark.parametrize("run", ON_TWO, ids=name_of)
def test_on_two_ranks(run: tuple[str, Layout, int, Sections]) -> None:
    follows(*run)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    any_number = schedule in ("GPipe", "ZBVZeroBubble")  # the others take them in groups of the pipeline's size
    follows("deep_gpt2", layout(1, 1, 2, pipeline_schedule=schedule), 3 if any_number else 4)


@pytest.mark.slow
@pytest.mark.parametrize("run", ON_FOUR, ids=name_of)
def test_on_four_ranks(run: tuple[str, Layout, int, Sections]) -> None:
    follows(*run)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES[2:])
def test_zero_bubble_of_replicas(schedule: str) -> None:
    follows("deep_gpt2", layout(2, 1, 2, pipeline_schedule=schedule), 4, CLIPPING)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES[2:])
def test_zero_bubble_with_the_loss_in_chunks(schedule: str) -> None:
    follows("gpt2_of_many_words", layout(1, 1, 2, pipeline_schedule=schedule), 4)


@pytest.mark.slow
@pytest.mark.parametrize("run", ON_EIGHT, ids=name_of)
def test_on_eight_ranks(run: tuple[str, Layout, int, Sections]) -> None:
    follows(*run)


def test_layers_that_stay_unsharded_train_as_in_one_process_and_the_run_says_which_they_are() -> None:
    case = dataclasses.replace(CASES["gpt2"], model=gpt2_of_three_heads)
    actual = train(case, layout(1, 2, 1, allow_whole_layers=True), updates=3)
    assert_follows(actual, train(case, Layout(), updates=3), *BOUNDS["32"])
    (told,) = [message for message in actual.messages if "unsharded" in message]
    assert "2 does not divide the 3 heads of 'h.0.attn.c_attn.weight' and 5 more (sizes that can: 3)" in told
