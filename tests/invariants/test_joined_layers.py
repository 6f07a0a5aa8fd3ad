"""Layers that read the same as one function train as each by itself, however a run is spread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onward.lowering.rewriting.linear_layers as linear_layers
import onward.lowering.rewriting.recomputed_inputs as recomputed_inputs
from onward.models import create_model
from tests.invariants.cases import Case, random
from tests.invariants.layouts import Layout, Result, differences, knowing_gradients, train_here, train_on_ranks

BOUND = 2e-6
"""Of losses and weights, as parts of their size: sums in another order, and what Adam makes of it in three updates."""
SIZE = {"size": "tiny", "layers": 4, "width": 16, "heads": 2, "vocab_size": 32, "context_length": 8}


def bert() -> ir.Model:
    """Queries, keys and values have a weight and a bias each."""
    return create_model("bert", **SIZE, dropout=0.0)


def sentences(samples: int) -> dict[str, np.ndarray]:
    return {
        "input1": random((samples, 8), 32),
        "input2": random((samples, 8), 2, seed=1),
        "input3": np.ones((samples, 8), np.int64),
        "masked_lm_positions": random((samples, 3), 8, seed=4),
        "masked_lm_ids": random((samples, 3), 31, seed=2) + 1,
        "next_sentence_labels": random((samples,), 2, seed=5),
    }


BERT = Case(bert, {"type": "bert"}, sentences)


def train_small_layers_here(sections: Any, *arguments: Any) -> Result:
    """The part of one rank, where no input is too small; says in a message how many sums were made in place."""
    least, original, sums = linear_layers.LEAST_BYTES, linear_layers.add_product, []

    def add_product(*operands: Any) -> Any:
        sums.append(1)
        return original(*operands)

    linear_layers.LEAST_BYTES, linear_layers.add_product = 0, add_product  # type: ignore[assignment]
    try:
        result = train_here(sections, *arguments)
    finally:
        linear_layers.LEAST_BYTES, linear_layers.add_product = least, original
    result.messages.append(f"{len(sums)} sums in place")
    return result


def both(layout: Layout, sums: int, **options: Any) -> tuple[float, float]:
    """How far losses and weights are apart; `sums` are made in place on every rank by the run with joined layers."""
    results = []
    for joins in (True, False):
        found = train_on_ranks(
            BERT, layout, updates=3, sections={"speed": {"join_layers": joins}}, here=train_small_layers_here, **options
        )
        for result in found:
            assert result.messages[-1] == f"{sums if joins else 0} sums in place"
        assert found[0].losses[0] != found[0].losses[-1]
        results.append(found[0])
    return differences(*results)


def test_one_process() -> None:
    """Two sums for each of four layers in three updates."""
    assert max(both(Layout(), 4 * 2 * 3)) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "sums"),
    [
        (Layout(data=2), 24),
        *((Layout(data=2, distributed={"zero_stage": stage}), 24) for stage in (1, 2, 3)),
        (Layout(horizontal=2), 24),
    ],
    ids=str,
)
def test_replicas_shards_and_parts(layout: Layout, sums: int) -> None:
    assert max(both(layout, sums)) <= BOUND


@pytest.mark.slow
def test_a_pipeline() -> None:
    """Two layers on each rank, two micro-batches an update."""
    assert max(both(Layout(pipeline=2), 2 * 2 * 2 * 3, accumulation=2)) <= BOUND


def train_overlapped_here(sections: Any, *arguments: Any) -> Result:
    """The part of one rank, where no input is too small; says in a message how often it computed during an exchange."""
    started: list[str] = []

    def noting(step: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            started.append(step)
            return original(*given)

        return noted

    def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: noting("waited", noting("begun", original)(*given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_layers, "LEAST_BYTES", 0)
        patch.setattr(linear_layers, "_of_parameters", noting("weights", linear_layers._of_parameters))
        for name in ("begin_sum", "begin_reduce_scatter"):
            patch.setattr(linear_layers, name, beginning(getattr(linear_layers, name)))
        result = train_here(sections, *arguments)
    overlaps = sum(started[place : place + 3] == ["begun", "weights", "waited"] for place in range(len(started)))
    assert started.count("begun") == started.count("waited") == overlaps
    result.messages.append(f"{overlaps} overlaps")
    return result


def train_one_after_the_other_here(sections: Any, *arguments: Any) -> Result:
    """The part of one rank, where no input is too small and gradients of weights come before the exchange."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputed_inputs, "_begins_region", lambda group: False)
        return train_small_layers_here(sections, *arguments)


def check_overlap(layout: Layout, overlaps: int, **options: Any) -> Result:
    """What rank 0 has of a run that computes during exchanges, `overlaps` there; one that waits has the same bits."""
    found = train_on_ranks(BERT, layout, updates=3, here=train_overlapped_here, **options)
    waits = train_on_ranks(BERT, layout, updates=3, here=train_one_after_the_other_here, **options)
    assert found[0].messages[-1] == f"{overlaps} overlaps"
    assert differences(found[0], waits[0]) == (0.0, 0.0)
    return found[0]


@pytest.mark.parametrize("by_tokens", [False, True])
def test_ranks_compute_gradients_of_weights_while_those_of_inputs_are_added_up(by_tokens: bool) -> None:
    """Two regions of each of four layers and two of the heads, in three updates on two ranks."""
    found = check_overlap(Layout(horizontal=2, distributed={"sequence_parallel": by_tokens}), (4 * 2 + 2) * 3)
    assert max(differences(found, train_on_ranks(BERT, Layout(), updates=3)[0])) <= 2 * BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "overlaps", "options"),
    [
        (Layout(2, 2, 1, {"zero_stage": 3}), 30, {}),
        (Layout(1, 2, 2), 48, {"accumulation": 4}),
        (Layout(1, 2, 2, {"pipeline_schedule": "ZBVZeroBubble"}), 0, {"accumulation": 4}),
        (Layout(1, 2, 1), 30, {"sections": {"mixed_precision": {"use_mixed_precision": True}}}),
        (Layout(1, 2, 1), 6, {"sections": {"recompute": {"segments": True}}}),
    ],
    ids=str,
)
def test_overlap_under_other_options(layout: Layout, overlaps: int, options: dict[str, Any]) -> None:
    check_overlap(layout, overlaps, **options)


@pytest.mark.slow
@knowing_gradients
def test_a_schedule_that_computes_gradients_of_weights_later_joins_nothing() -> None:
    """And loses none of them."""
    layout = Layout(pipeline=2, distributed={"pipeline_schedule": "ZBVZeroBubble"})
    assert both(layout, 0, accumulation=4) == (0.0, 0.0)
    split, plain = (
        train_on_ranks(BERT, one, updates=3, here=train_small_layers_here, accumulation=4)[0]
        for one in (layout, Layout())
    )
    assert max(differences(split, plain)) <= BOUND
