"""Runs in 16 bits in many layouts, and gradients that travel in 16 bits: near one process, within the type's rounding.

A number in fp16 is off by up to 2^-11 = 5e-4 of itself, in bf16 by 2^-8 = 4e-3; a mean over thousands of them by less.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.invariants.cases import CASES, CROSS_ENTROPY, Case, mlp, points
from tests.invariants.layouts import Layout, Result, assert_moves, differences, train
from tests.invariants.rank_pool import end_ranks

BF16 = {"mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True}}
FP16 = {"mixed_precision": {"use_mixed_precision": True, "loss_scale": 0}}
OF_LOSSES = {"bf16": 4e-3, "fp16": 5e-4}
OF_WEIGHTS = {"bf16": 2e-2, "fp16": 4e-3}
"""Of the largest element of a weight, after six updates by AdamW, each of a thousandth to a hundredth of it."""
LAYOUTS = [
    Layout(2, 1, 1), Layout(2, 1, 1, {"zero_stage": 3}), Layout(1, 2, 1), Layout(1, 1, 2),
    pytest.param(Layout(2, 2, 1, {"zero_stage": 2}), marks=pytest.mark.slow),
    pytest.param(Layout(2, 1, 2, {"zero_stage": 1}), marks=pytest.mark.slow),
    pytest.param(Layout(2, 2, 2), marks=pytest.mark.slow),
    pytest.param(Layout(1, 1, 1, {"context_parallel_size": 2}), marks=pytest.mark.slow),
]  # fmt: skip
Sections = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


@functools.cache
def one_process(sections: str, accumulation: int = 2) -> Result:
    return train(CASES["gpt2"], Layout(), accumulation=accumulation, sections=json.loads(sections))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_mixed_precision(kind: str, layout: Layout) -> None:
    sections: Sections = {**(BF16 if kind == "bf16" else FP16), "optimizer": {"max_norm_clip": 0.5}}
    expected = one_process(json.dumps(sections))
    actual = train(CASES["gpt2"], layout, accumulation=2, sections=sections)
    loss, weight = differences(actual, expected)
    assert loss < OF_LOSSES[kind]
    assert weight < OF_WEIGHTS[kind]
    assert actual.loss_scale == expected.loss_scale
    assert_moves(actual)
    assert differences(one_process(json.dumps({"optimizer": {"max_norm_clip": 0.5}})), expected)[0] > 0


def points_and_one_far_away(samples: int) -> dict[str, np.ndarray]:
    """A sample of the third update, which only the second of two replicas sees, is beyond fp16."""
    data = points(samples)
    data["x"][2 * 2 * 64 + 61, 3] = 1e5
    return data


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_an_overflow_on_one_rank_is_skipped_by_all(layout: Layout) -> None:
    case = Case(mlp, CROSS_ENTROPY, points_and_one_far_away)
    expected = train(case, Layout(), global_batch=64, accumulation=2, sections=FP16)
    actual = train(case, layout, global_batch=64, accumulation=2, sections=FP16)
    for result in (expected, actual):
        # The first loss scale, 65536, is too much for this network; the next one fits all but that sample.
        assert [math.isfinite(norm) for norm in result.norms] == [False, True, False, True, True, True]
        assert (result.skipped, result.loss_scale) == (2, 16384)
    assert [a for a in actual.losses if math.isfinite(a)] == pytest.approx(
        [e for e in expected.losses if math.isfinite(e)], rel=OF_LOSSES["fp16"]
    )
    assert all(weight.isfinite().all() for weight in actual.tensors.values())


IN_FP32 = {"sum_in_fp32": True}


@pytest.mark.parametrize(
    ("kind", "zero_stage", "more"),
    [("bf16", 0, {}), ("bf16", 2, {}), ("fp16", 0, {}), ("fp16", 2, {}), ("bf16", 0, IN_FP32), ("bf16", 3, IN_FP32)],
)
def test_gradients_that_travel_in_16_bits(kind: str, zero_stage: int, more: dict[str, bool]) -> None:
    """The norm of the first mean gradient is off by less than a rounding error of its type; what follows stays near."""
    expected = one_process("{}")
    layout = Layout(2, 1, 1, {"zero_stage": zero_stage, "reduction_type": kind, **more})
    actual = train(CASES["gpt2"], layout, accumulation=2)
    assert 0 < abs(actual.norms[0] / expected.norms[0] - 1) < {"bf16": 2**-8, "fp16": 2**-11}[kind]
    loss, weight = differences(actual, expected)
    assert loss < OF_LOSSES[kind]
    assert 1e-6 < weight < OF_WEIGHTS[kind]
