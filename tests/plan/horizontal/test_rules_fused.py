"""Rules of fused operators: which axes go together, and what cannot be computed on shards, in words."""

from __future__ import annotations

from typing import Any

import pytest

from onward.graph.fusion.rewriting import DOMAIN
from onward.plan.horizontal.cuts import AddBiasAfterReduce, CannotShardError, NodeContext, Replace
from onward.plan.horizontal.rules import apply_rule
from onward.plan.shards import Sharding
from tests.plan.horizontal.nodes import Case, assert_said, site

X, W, Y = {"x": (2, 3, 8)}, {"w": (8, 6)}, {"y": (2, 3, 6)}
LINEAR = site("Linear", {**X, **W, "b": (6,)}, Y, domain=DOMAIN)


def test_columns_and_rows_of_a_linear_layer() -> None:
    columns = apply_rule(LINEAR, {1: Sharding(1, (6,))}, {})
    assert (columns.inputs[2], columns.outputs[0]) == (Sharding(0, (6,)), Sharding(2, (6,)))
    rows = apply_rule(LINEAR, {1: Sharding(0, (8,))}, {})
    assert rows.inputs[0] == Sharding(2, (8,))
    assert (rows.partial, rows.edits) == (True, (AddBiasAfterReduce(2, 2),))
    turned = site("Linear", {**X, "w": (6, 8)}, Y, domain=DOMAIN, rows_are_outputs=1)
    assert apply_rule(turned, {1: Sharding(0, (6,))}, {}).outputs[0] == Sharding(2, (6,))


def attention(mask: tuple[int, ...] = (), **attributes: float) -> NodeContext:
    heads = dict.fromkeys("qkv", (2, 4, 5, 8))
    more = {"mask": mask, "seen": (2, 1, 5, 1)} if mask else {}
    return site("Attention", {**heads, **more}, {"y": (2, 4, 5, 8)}, domain=DOMAIN, **attributes)


def test_attention_is_sharded_by_heads_and_drops_by_rank() -> None:
    cut = Sharding(1, (4,))
    found = apply_rule(attention(), {0: cut}, {})
    assert (dict(found.inputs), dict(found.outputs)) == ({0: cut, 1: cut, 2: cut}, {0: cut})
    assert found.edits == ()
    assert apply_rule(attention(dropout_ratio=0.1), {0: cut}, {}).edits == (Replace("Attention", cut),)


def test_quantization_by_channels() -> None:
    node = site("QuantizeLinear", {"x": (8, 4), "s": (8,), "z": (8,)}, {"y": (8, 4)}, axis=0)
    cut = Sharding(0, (8,))
    assert dict(apply_rule(node, {0: cut}, {}).inputs) == {0: cut, 1: cut, 2: cut}
    one = site("QuantizeLinear", {"x": (8, 4), "s": ()}, {"y": (8, 4)})
    assert dict(apply_rule(one, {0: cut}, {}).inputs) == {0: cut}


def mixture(gated: int, *weights: tuple[int, ...], **attributes: Any) -> NodeContext:
    routes = {"x": (2, 3, 8), "chosen": (2, 3, 2), "shares": (2, 3, 2)}
    named = {f"w{index}": shape for index, shape in enumerate(weights)}
    return site("Experts", {**routes, **named}, Y, domain=DOMAIN, gated=gated, **attributes)


def test_experts_are_sharded_by_their_hidden_features() -> None:
    stacks = mixture(1, (4, 8, 6), (4, 8, 6), (4, 6, 8), rows_are_outputs=0, is_biased=0)
    found = apply_rule(stacks, {3: Sharding(2, (6,))}, {})
    assert dict(found.inputs) == {3: Sharding(2, (6,)), 4: Sharding(2, (6,)), 5: Sharding(1, (6,))}
    assert found.partial
    tokens = apply_rule(stacks, {0: Sharding(1, (3,))}, {})
    assert dict(tokens.inputs) == dict.fromkeys(range(3), Sharding(1, (3,)))
    assert dict(tokens.outputs) == {0: Sharding(1, (3,))}
    single = mixture(0, (6, 8), (6, 8), (8, 6), (8, 6), (6,), (6,), (8,), (8,), rows_are_outputs=1, is_biased=1)
    found = apply_rule(single, {7: Sharding(0, (6,))}, {})
    rows, columns = Sharding(0, (6,)), Sharding(1, (6,))
    assert dict(found.inputs) == {3: rows, 4: rows, 5: columns, 6: columns, 7: rows, 8: rows}


def test_gates_and_values_in_one_matrix_are_sharded_alike() -> None:
    joint = mixture(2, (4, 12, 8), (4, 8, 6), rows_are_outputs=1, is_biased=0)
    with pytest.raises(CannotShardError) as caught:
        apply_rule(joint, {3: Sharding(1, (12,))}, {})
    assert caught.value.hint == (6, 6)
    found = apply_rule(joint, {3: Sharding(1, (6, 6))}, {})
    assert dict(found.inputs) == {3: Sharding(1, (6, 6)), 4: Sharding(2, (6,))}


def test_gates_that_alternate_with_values_stay_with_them() -> None:
    joint = mixture(3, (4, 8, 12), (4, 6, 8), (4, 12), (4, 8), rows_are_outputs=0, is_biased=1)
    found = apply_rule(joint, {3: Sharding(2, (12,))}, {})
    assert dict(found.inputs) == {3: Sharding(2, (12,)), 4: Sharding(1, (6,)), 5: Sharding(1, (12,))}


CASES: dict[str, Case] = {
    "half a gate": (
        mixture(3, (4, 8, 12), (4, 6, 8), rows_are_outputs=0, is_biased=0), {3: Sharding(2, (7, 5))}, {},
        "needs each gate sharded with its value",
    ),
    "inputs of experts": (
        mixture(0, (4, 8, 6), (4, 6, 8), rows_are_outputs=0, is_biased=0), {3: Sharding(1, (8,))}, {},
        "can be sharded by the hidden features of its experts only",
    ),
    "features of tokens": (
        mixture(0, (4, 8, 6), (4, 6, 8), rows_are_outputs=0, is_biased=0), {0: Sharding(2, (8,))}, {},
        "needs all of its features of a token at once",
    ),
    "in blocks": (
        site("DequantizeLinear", {"x": (8, 4), "s": (2, 4)}, {"y": (8, 4)}, block_size=4), {0: Sharding(0, (8,))}, {},
        "quantizes in blocks",
    ),
    "halves that are turned": (
        site("RotaryEmbedding", {"x": (2, 3, 8), "c": (1, 3, 8), "s": (1, 3, 8)}, {"y": (2, 3, 8)}, domain=DOMAIN),
        {0: Sharding(2, (8,))}, {}, "needs all of its features at once (axis 2 of input 0)",
    ),
    "queries": (
        site("VisibleRows", {"m": (2, 4, 5, 5)}, {"y": (2, 4, 5, 1)}, domain=DOMAIN), {0: Sharding(2, (5,))}, {},
        "needs all of its cut axis at once (axis 2 of input 0)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_cut_says_why(case: str) -> None:
    assert_said(CASES[case])
