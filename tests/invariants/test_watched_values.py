"""Values that the graph computes on the way look the same through a pipeline, whichever stage computes them."""

from __future__ import annotations

import pytest
import torch

from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, knowing_gradients, train

VALUES = [
    "causal/LessOrEqual_output",
    "h.0/Add_output",
    "h.5.mlp.c_fc/Add_output",
    "h.6.ln_1/LayerNormalization_output",
    "logits",
]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=2),
        pytest.param(Layout(pipeline=2, distributed={"pipeline_schedule": "ZBVZeroBubble"}), marks=knowing_gradients),
        pytest.param(Layout(horizontal=2, pipeline=2), marks=pytest.mark.slow),
        pytest.param(Layout(horizontal=2, pipeline=2, distributed={"sequence_parallel": True}), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values_of_all_stages_are_watched(layout: Layout) -> None:
    case = CASES["deep_gpt2"]
    sections = {"tensorboard": {"histogram_names": [*VALUES, "wte.weight"], "scalar_names": ["loss"]}}
    alone = train(case, Layout(), updates=2, accumulation=4, sections=sections)
    found = train(case, layout, updates=2, accumulation=4, sections=sections)
    assert len(alone.watched) == len(found.watched) == 2
    for expected, actual in zip(alone.watched, found.watched, strict=True):
        assert set(actual) == set(expected) == {*VALUES, "wte.weight", "loss"}
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5)
    assert not torch.equal(alone.watched[0]["logits"], alone.watched[1]["logits"])
