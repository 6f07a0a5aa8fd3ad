"""Compiled segments train as uncompiled ones do, in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.laws.layouts import Case, Layout, differences, train
from tests.laws.test_recompute import LANGUAGE, NORMALIZED

BOUND = 1e-5
LAYOUTS = {
    "replicas": Layout(data=2),
    "ZeRO 3": Layout(data=2, distributed={"zero_stage": 3}),
    "horizontal": Layout(horizontal=2),
    "pipeline": Layout(pipeline=2),
}

pytestmark = pytest.mark.slow


def difference(case: Case, layout: Layout, sections: Mapping[str, Any], **arguments: Any) -> float:
    """The largest difference of losses, weights and statistics that compilation makes."""
    plain = train(case, layout, updates=3, sections={**sections, "speed": {"compile": False}}, **arguments)
    found = train(case, layout, updates=3, sections={**sections, "speed": {"compile": True}}, **arguments)
    assert plain.losses[0] != plain.losses[-1]
    return max(differences(found, plain))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_processes(layout: str) -> None:
    accumulation = 2 if layout == "pipeline" else 1
    assert difference(LANGUAGE, LAYOUTS[layout], {}, accumulation=accumulation) <= BOUND


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_running_statistics_move_once(recompute: bool) -> None:
    assert difference(NORMALIZED, Layout(), {"recompute": {"segments": recompute}}) <= BOUND


def test_statistics_over_replicas() -> None:
    layout = Layout(data=2, distributed={"synchronize_batch_norm": True})
    assert difference(NORMALIZED, layout, {}) <= BOUND
