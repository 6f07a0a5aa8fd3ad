"""What ZeRO exchanges together: blocks that repeat, and what lies around them, by the bytes of their weights."""

from __future__ import annotations

import pytest

from onward.parameters.distributed import Recompute
from onward.plan.costs.segments import SegmentPlan, plan_segments
from onward.plan.zero_units import LEAST_BYTES, HeldWeight, choose_units
from tests.plan.staged_models import graph_of

MILLION = 10**6


def held(*shapes: tuple[int, ...], element_type: str = "FLOAT") -> list[HeldWeight]:
    return [HeldWeight(shape, element_type) for shape in shapes]


ATTENTION, MLP, CONVOLUTION = held((1000, 3000), (3000,)), held((1000, 4000), (4000, 1000)), held((64, 64, 3, 3))
TABLE, POSITIONS, NORM = held((50_000, 1000)), held((100, 1000)), held((1000,), (1000,))


def groups(segments: list[list[HeldWeight]], backward_follows: bool = True) -> list[tuple[int, ...]]:
    return [unit.segments for unit in choose_units(segments, backward_follows)]


def test_a_block_that_repeats_is_a_unit_however_many_segments_it_has() -> None:
    layers = [ATTENTION, [], MLP] * 3
    found = choose_units([[], POSITIONS, *layers, NORM], backward_follows=True)
    assert [unit.segments for unit in found] == [(2, 3, 4), (5, 6, 7), (8, 9, 10)]
    assert {unit.nbytes for unit in found} == {4 * (3 * MILLION + 3000 + 8 * MILLION)}
    assert not any(unit.is_kept for unit in found), "positions and norm stay with what several segments read"


def test_an_encoder_and_a_decoder_have_blocks_of_their_own() -> None:
    assert groups([ATTENTION, MLP] * 2 + [NORM] + [ATTENTION, ATTENTION, MLP] * 2) == [
        (0, 1), (2, 3), (5, 6, 7), (8, 9, 10),
    ]  # fmt: skip


def test_the_last_unit_keeps_its_weights_where_the_backward_pass_begins_with_it() -> None:
    network = [TABLE, *[ATTENTION] * 2, [*NORM, *TABLE]]
    assert groups(network) == [(0,), (1,), (2,), (3,)]
    assert [unit.is_kept for unit in choose_units(network, True)] == [False, False, False, True]
    assert not any(unit.is_kept for unit in choose_units(network, False))


def test_blocks_and_other_segments_of_few_bytes_are_put_together() -> None:
    size = CONVOLUTION[0].nbytes
    together = -(-LEAST_BYTES // size)
    assert together > 1
    assert [len(group) for group in groups([CONVOLUTION] * (9 * together + 1))] == [together] * 9 + [1]
    unlike = [held((64 + index, 64, 3, 3)) for index in range(9 * together)]
    found = choose_units(unlike, True)
    assert [index for unit in found for index in unit.segments] == list(range(9 * together))
    assert all(LEAST_BYTES <= unit.nbytes < LEAST_BYTES + 2 * size for unit in found[:-1])
    assert found[-1].nbytes >= LEAST_BYTES


def test_a_small_network_is_cut_all_the_same() -> None:
    tiny = [held((8, 8))] * 12
    assert groups(tiny) == [(index, index + 1) for index in range(0, 12, 2)]


def test_weights_of_two_types_are_not_put_together() -> None:
    double = held((64, 64, 3, 3), element_type="DOUBLE")
    assert double[0].nbytes == 2 * CONVOLUTION[0].nbytes
    assert groups([CONVOLUTION, double] * 3) == [(0,), (1,), (2,), (3,), (4,), (5,)]


def test_single_numbers_and_networks_without_weights_of_their_own_are_no_units() -> None:
    assert groups([held(()), []]) == []
    assert groups([held(()), ATTENTION, held(())]) == [(1,)]


def plan(name: str, **recompute: object) -> SegmentPlan:
    graph = graph_of(name)
    return plan_segments(graph.model.graph, graph.weights, True, Recompute(**recompute))  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", [{}, {"segments": True}, {"attention": True}])
def test_the_layers_of_transformers_are_units(recompute: dict[str, object]) -> None:
    for name, layer in [("gpt2", "h."), ("bert", "layer.")]:
        found = plan(name, **recompute)
        by_unit = [
            {weight for weight, readers in found.readers.items() if readers[0] in unit.segments and len(readers) == 1}
            for unit in found.units
        ]
        blocks = [weights for weights in by_unit if any(layer in weight for weight in weights)]
        assert len(blocks) == 4
        for index, weights in enumerate(blocks):
            assert all(f"{layer}{index}." in weight for weight in weights), weights
            assert len(weights) >= 12
