"""What a context rank makes of attention, losses and slices; the rest is tensor parallelism's."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from onward.graph.fusion.rewriting import DOMAIN
from onward.plan.context.ranges import TokenCut
from onward.plan.context.rules import cut_node
from onward.plan.horizontal.cuts import CannotShardError, NodeContext, SetEntry
from tests.plan.horizontal.nodes import site

TOKENS = TokenCut(2, (8,))
HEADS = (2, 4, 8, 16)


def attention(mask: tuple[int, ...]) -> NodeContext:
    return site("Attention", {**dict.fromkeys("qkv", HEADS), "mask": mask}, {"y": HEADS}, domain=DOMAIN)


def test_attention_is_of_own_queries_and_rows_of_the_mask_with_keys_that_it_gathers() -> None:
    found = cut_node(attention((8, 8)), dict.fromkeys(range(3), TOKENS), {}, 2)
    assert found.attention == (TOKENS, TOKENS)
    assert dict(found.assignment.inputs) == {0: TOKENS, 1: TOKENS, 2: TOKENS, 3: TokenCut(0, (8,))}
    padding = cut_node(attention((2, 1, 1, 8)), {0: TOKENS}, {}, 2)
    assert padding.attention == (TOKENS, None)
    assert dict(padding.assignment.inputs) == {0: TOKENS}


def test_a_mean_loss_is_weighted_by_labels_and_a_sum_is_added_up() -> None:
    shapes = {"x": (16, 10), "labels": (16,)}
    rows = TokenCut(0, (8, 8))
    mean = cut_node(site("SoftmaxCrossEntropyLoss", shapes, {"loss": ()}), {0: rows}, {}, 2)
    assert (mean.mean, mean.assignment.partial, mean.assignment.inputs[1]) == ((1, 2), True, rows)
    total = cut_node(site("SoftmaxCrossEntropyLoss", shapes, {"loss": ()}, reduction="sum"), {0: rows}, {}, 2)
    assert (total.mean, total.assignment.partial) == (None, True)
    each = cut_node(site("SoftmaxCrossEntropyLoss", shapes, {"loss": (16,)}, reduction="none"), {0: rows}, {}, 2)
    assert dict(each.assignment.outputs) == {0: rows}


def test_hidden_rows_of_a_fused_loss_are_those_of_its_labels() -> None:
    shapes = {"x": (2, 8, 16), "w": (300, 16), "labels": (16,)}
    node = site("LinearCrossEntropy", shapes, {"loss": ()}, domain=DOMAIN)
    found = cut_node(node, {0: TokenCut(1, (8,))}, {}, 2)
    assert (found.mean, found.assignment.inputs[2]) == ((2, 5), TokenCut(0, (8, 8)))


def cut_by_slice(kept: tuple[int, int], length: int = 8) -> NodeContext:
    sizes: Mapping[str, tuple[int, ...]] = {"x": (2, length), "starts": (1,), "ends": (1,), "axes": (1,)}
    numbers = {"starts": (kept[0],), "ends": (kept[1],), "axes": (1,)}
    count = len(range(*slice(*kept).indices(length)))
    return site("Slice", sizes, {"y": (2, count)}, numbers)


def test_a_slice_without_the_last_tokens_is_local() -> None:
    found = cut_node(cut_by_slice((0, -1)), {0: TokenCut(1, (8,))}, {}, 2).assignment
    assert dict(found.outputs) == {0: TokenCut(1, (7,))}
    assert found.edits == (SetEntry(2, 0, TokenCut(1, (7,)), 1),)


@pytest.mark.parametrize("kept", [(1, 8), (0, 2), (2, 6)])
def test_a_slice_that_moves_tokens_to_other_ranks_needs_them_all(kept: tuple[int, int]) -> None:
    with pytest.raises(CannotShardError, match=r"node 'n' \(Slice\) takes part of the sequence"):
        cut_node(cut_by_slice(kept), {0: TokenCut(1, (8,))}, {}, 2)


HALVED = {"x": (24, 4), "starts": (1,), "ends": (1,), "axes": (1,), "steps": (1,)}
SCALED = {
    "tokens of several samples are merged, time first": (
        site("Reshape", {"x": (12, 2, 4), "sizes": (2,)}, {"y": (24, 4)}, {"sizes": (-1, 4)}), TokenCut(0, (12,)), ()
    ),
    "two tokens become one": (
        site("Reshape", {"x": (2, 12, 4), "sizes": (3,)}, {"y": (2, 6, 8)}, {"sizes": (0, -1, 8)}),
        TokenCut(1, (12,)), (2,),
    ),
    "every second token": (
        site("Slice", HALVED, {"y": (12, 4)}, {"starts": (0,), "ends": (24,), "axes": (0,), "steps": (2,)}),
        TokenCut(0, (12, 12)), (2,),
    ),
    "the rows of a fused loss": (
        site("LinearCrossEntropy", {"x": (12, 2, 16), "w": (300, 16), "labels": (24,)}, {"loss": ()}, domain=DOMAIN),
        TokenCut(0, (12,)), (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_lengths_in_proportion_are_cut_only_where_their_chunks_are(name: str) -> None:
    node, cut, wrong = SCALED[name]
    for size in (1, 2, 3, 5):
        if size in wrong:
            with pytest.raises(CannotShardError, match="are not cut at the same places"):
                cut_node(node, {0: cut}, {}, size)
        else:
            assert cut_node(node, {0: cut}, {}, size).assignment.inputs[0] == cut


def test_tokens_of_several_samples_time_first_are_rows_of_one_token() -> None:
    merged = site("Reshape", {"x": (7, 2, 4), "sizes": (2,)}, {"y": (14, 4)}, {"sizes": (-1, 4)})
    found = cut_node(merged, {0: TokenCut(0, (7,))}, {}, 2).assignment
    assert dict(found.outputs) == {0: TokenCut(0, (14,), (), 2)}
    split = site("Reshape", {"x": (14, 4), "sizes": (3,)}, {"y": (7, 2, 4)}, {"sizes": (7, -1, 4)})
    assert dict(cut_node(split, dict(found.outputs), {}, 2).assignment.outputs) == {0: TokenCut(0, (7,))}  # type: ignore[arg-type]
    add = site("Add", {"a": (14, 4), "b": (14, 4)}, {"y": (14, 4)})
    with pytest.raises(CannotShardError, match="the tokens of its operands have different rows"):
        cut_node(add, {0: TokenCut(0, (14,)), 1: TokenCut(0, (14,), (), 2)}, {}, 2)


def test_what_exchanges_statistics_over_tensor_parallel_ranks_needs_all_tokens() -> None:
    with pytest.raises(CannotShardError, match="needs the full sequence"):
        cut_node(site("Softmax", {"x": (2, 8)}, {"y": (2, 8)}), {0: TokenCut(1, (8,))}, {}, 2)
