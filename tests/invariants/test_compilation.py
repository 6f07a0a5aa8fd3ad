"""Compiled segments train as uncompiled ones do, in every layout.

By plain gradient descent: what it changes is in proportion to the gradients, and so is what rounding does. Adam would
make an element whose gradient is nothing but rounding (a bias before a batch normalization) as large as any other.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.invariants.layouts import Case, Layout, differences, train
from tests.invariants.test_recompute import LANGUAGE, NORMALIZED

BOUND = 5e-6
DESCENT: dict[str, Any] = {
    "optimizer": {"training_optimizer_name": "SGDOptimizer", "optimizer_attributes": []},
    "learning_rate": {"initial_lr": 0.3},
}
LAYOUTS = {
    "replicas": Layout(data=2),
    "ZeRO 3": Layout(data=2, distributed={"zero_stage": 3}),
    "horizontal": Layout(horizontal=2),
    "pipeline": Layout(pipeline=2),
}

pytestmark = pytest.mark.slow


def difference(case: Case, layout: Layout, **arguments: Any) -> float:
    """The largest difference of losses, weights and statistics that compilation makes."""
    plain = train(case, layout, updates=3, sections={**DESCENT, "speed": {"compile": False}}, **arguments)
    found = train(case, layout, updates=3, sections={**DESCENT, "speed": {"compile": True}}, **arguments)
    assert plain.losses[0] != plain.losses[-1]
    return max(differences(found, plain))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_processes(layout: str) -> None:
    accumulation = 2 if layout == "pipeline" else 1
    assert difference(LANGUAGE, LAYOUTS[layout], accumulation=accumulation) <= BOUND


def test_running_statistics_move_once() -> None:
    assert difference(NORMALIZED, Layout()) <= BOUND


def test_running_statistics_move_once_when_recomputed() -> None:
    compiled: dict[str, Any] = {**DESCENT, "speed": {"compile": True}}
    kept = train(NORMALIZED, Layout(), updates=3, sections=compiled)
    repeated = train(NORMALIZED, Layout(), updates=3, sections={**compiled, "recompute": {"segments": True}})
    assert max(differences(repeated, kept)) <= BOUND


def test_statistics_over_replicas() -> None:
    layout = Layout(data=2, distributed={"synchronize_batch_norm": True})
    assert difference(NORMALIZED, layout) <= BOUND
