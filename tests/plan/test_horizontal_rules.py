"""What each rule says when a node cannot compute on parts: in words, with the node's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import pytest

from onward.plan.horizontal import planning
from onward.plan.horizontal.cuts import CannotShardError, Facts, NodeContext
from onward.plan.horizontal.rules import apply_rule
from onward.plan.shards import Sharding

assert planning  # importing it registers the rules
SIZES = (4, 8)


def site(
    op_type: str,
    inputs: Mapping[str, tuple[int, ...]],
    outputs: Mapping[str, tuple[int, ...]],
    numbers: Mapping[str, Any] | None = None,
    version: int = 20,
    domain: str = "",
    **attributes: Any,
) -> NodeContext:
    """A node with the shapes of its operands; an operand named "" is left out."""
    operands = [ir.Value(name=name) if name else None for name in inputs]
    node = ir.node(
        op_type, operands, attributes=attributes, outputs=[ir.Value(name=name) for name in outputs],
        domain=domain, name="n",
    )  # fmt: skip
    return NodeContext(node, version, Facts({**inputs, **outputs}, numbers or {}, frozenset(inputs)))


def said(
    node: NodeContext, inputs: Mapping[int, Sharding] | None = None, outputs: Mapping[int, Sharding] | None = None
) -> str:
    with pytest.raises(CannotShardError) as caught:
        apply_rule(node, inputs or {}, outputs or {})
    return str(caught.value)


X, Y = {"x": SIZES}, {"y": SIZES}
COLUMNS = {0: Sharding(1, (8,))}
IMAGE = (2, 8, 6, 6)
CASES: dict[str, tuple[NodeContext, Mapping[int, Sharding], Mapping[int, Sharding], str]] = {
    "no rule": (site("Det", X, Y), COLUMNS, {}, "nothing is known of how Det computes on shards"),
    "whole operand": (
        site("Attention", {"q": (2, 3, 8), "k": (2, 3, 4), "v": (2, 3, 4)}, {"y": (2, 3, 8)},
             q_num_heads=2, kv_num_heads=1),
        {1: Sharding(2, (4,))}, {}, "needs its operand 1 unsharded or sharded in another way",
    ),
    "old softmax": (
        site("Softmax", {"x": IMAGE}, {"y": IMAGE}, version=11, axis=1),
        {0: Sharding(1, (8,))}, {}, "is over several axes at once",
    ),
    "running sum": (site("CumSum", {**X, "axis": ()}, Y), COLUMNS, {}, "its axis depends on data"),
    "groups normalized": (
        site("GroupNormalization", {"x": IMAGE, "s": (8,), "b": (8,)}, {"y": IMAGE}, num_groups=2),
        {0: Sharding(1, (6, 2))}, {}, "a group of channels would be split",
    ),
    "positions": (
        site("MaxPool", {"x": IMAGE}, {"y": IMAGE, "i": IMAGE}), {0: Sharding(1, (8,))}, {},
        "gives positions in the full tensor",
    ),
    "padded axes": (
        site("Pad", {**X, "pads": (2,), "value": (), "axes": (1,)}, {"y": (4, 10)}), {0: Sharding(0, (4,))}, {},
        "pads chosen axes",
    ),
    "padded by data": (
        site("Pad", {**X, "pads": (4,)}, Y), COLUMNS, {}, "how much it pads depends on data",
    ),
    "moved by padding": (
        site("Pad", {**X, "pads": (4,)}, Y, {"pads": (0, 1, 0, -1)}), COLUMNS, {},
        "needs all of its padded axis at once (axis 1 of input 0)",
    ),
    "moved by a scale near 1": (
        site("Resize", {**X, "": (), "scales": (2,)}, Y, {"scales": (2.0, 1.1)}), COLUMNS, {},
        "needs all of its resized axis at once (axis 1 of input 0)",
    ),
    "scaled by data": (
        site("Resize", {**X, "": (), "scales": (2,)}, Y), COLUMNS, {}, "how much it resizes depends on data",
    ),
    "moved by a region": (
        site("Resize", {**X, "roi": (4,), "scales": (2,)}, Y, {"scales": (1.0, 1.0)},
             coordinate_transformation_mode="tf_crop_and_resize"),
        COLUMNS, {}, "needs all of its resized axis at once (axis 1 of input 0)",
    ),
    "reduced axes": (
        site("ReduceSum", {**X, "axes": (1,)}, {"y": (4, 1)}), COLUMNS, {}, "its axes depend on data",
    ),
    "probabilities": (
        site("SoftmaxCrossEntropyLoss", {**X, "labels": (4,)}, {"loss": (), "p": SIZES}), COLUMNS, {},
        "also gives the logarithms of all probabilities",
    ),
    "by samples": (
        site("SoftmaxCrossEntropyLoss", {**X, "labels": (4,)}, {"loss": ()}), {0: Sharding(0, (4,))}, {},
        "can be sharded by classes only",
    ),
    "equation": (
        site("Einsum", {**X, "w": (8, 3)}, {"y": (4, 3)}, equation="ij,jk"), COLUMNS, {},
        "the equation 'ij,jk' leaves axes out",
    ),
    "packed": (
        site("MultiHeadAttention", {"qkv": (2, 3, 2, 3, 4)}, {"y": (2, 3, 8)}, domain="com.microsoft", num_heads=2),
        {0: Sharding(2, (2,))}, {}, "has packed operands, masks or a past",
    ),
    "groups convolved": (
        site("Conv", {"x": IMAGE, "w": (8, 4, 1, 1)}, {"y": IMAGE}, group=2), {0: Sharding(1, (6, 2))}, {},
        "a group of channels would be split",
    ),
    "groups by samples": (
        site("Conv", {"x": IMAGE, "w": (8, 4, 1, 1)}, {"y": IMAGE}, group=2), {0: Sharding(0, (2,))}, {},
        "is sharded along other axes than its groups",
    ),
    "picked": (
        site("Gather", {**X, "i": (2,)}, {"y": (4, 2)}, axis=1), COLUMNS, {}, "picks elements of the sharded axis",
    ),
    "heads unsaid": (
        site("RotaryEmbedding", {"x": (2, 3, 8), "cos": (3, 2), "sin": (3, 2)}, {"y": (2, 3, 8)}),
        {0: Sharding(2, (8,))}, {}, "does not say how many heads there are",
    ),
    "mixed": (
        site("Reshape", {**X, "s": (2,)}, {"y": (8, 4)}, {"s": (8, 4)}), {0: Sharding(1, (6, 2))}, {},
        "mixes the sharded axis 1 with others: [4, 8] to [8, 4]",
    ),
    "joined across": (
        site("Concat", {"a": (4, 3), "b": (4, 5)}, Y, axis=1), {0: Sharding(1, (3,)), 1: Sharding(0, (4,))}, {},
        "its operands are sharded along different axes",
    ),
    "joined over a border": (
        site("Concat", {"a": (4, 3), "b": (4, 5)}, Y, axis=1), {}, {0: Sharding(1, (8,))},
        "a shard of its result crosses an operand's border",
    ),
    "split across": (
        site("Split", X, {"a": (4, 4), "b": (4, 4)}, axis=1, num_outputs=2), {},
        {0: Sharding(1, (4,)), 1: Sharding(0, (4,))},
        "its outputs are sharded along different axes",
    ),
    "split over a border": (
        site("Split", X, {"a": (4, 4), "b": (4, 4)}, axis=1, num_outputs=2), COLUMNS, {},
        "a shard of its operand crosses an output's border",
    ),
    "split unequally": (
        site("Split", X, {"a": (4, 5), "b": (4, 3)}, axis=1, num_outputs=2), {0: Sharding(1, (5, 3))}, {},
        "has outputs of different sizes that it does not list",
    ),
    "every second": (
        site("Slice", {**X, "s": (1,), "e": (1,), "a": (1,), "t": (1,)}, {"y": (4, 4)},
             {"s": (0,), "e": (8,), "a": (1,), "t": (2,)}),
        COLUMNS, {}, "takes every 2th element of the sharded axis",
    ),
    "sliced by data": (
        site("Slice", {**X, "s": (1,), "e": (1,), "a": (1,)}, {"y": (4, 5)}, {"a": (1,)}), COLUMNS, {},
        "where it slices depends on data",
    ),
    "sliced over a border": (
        site("Slice", {**X, "s": (1,), "e": (1,), "a": (1,)}, {"y": (4, 5)}, {"s": (0,), "e": (5,), "a": (1,)}),
        COLUMNS, {}, "a shard of its operand crosses the slice's border",
    ),
    "reversed": (
        site("Slice", {**X, "s": (1,), "e": (1,), "a": (1,), "t": (1,)}, Y,
             {"s": (-1,), "e": (-9,), "a": (1,), "t": (-1,)}),
        COLUMNS, {}, "reverses the sharded axis",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_cut_says_why(case: str) -> None:
    node, inputs, outputs, words = CASES[case]
    message = said(node, inputs, outputs)
    assert words in message
    assert message.startswith("node 'n' (")


def test_a_shape_that_depends_on_data_is_named() -> None:
    node = site("Relu", X, Y)
    del node.facts.shapes["y"]  # type: ignore[attr-defined]
    assert said(node, COLUMNS).endswith("the shape of its output 0 depends on data")


@pytest.mark.parametrize(("version", "inputs"), [(20, {**X, "pads": (4,)}), (2, X)])
def test_axes_without_padding_are_kept(version: int, inputs: dict[str, tuple[int, ...]]) -> None:
    given = {"pads": (1, 0, 1, 0)}
    node = site("Pad", inputs, {"y": (6, 8)}, given, version, **(given if version < 11 else {}))
    assert apply_rule(node, COLUMNS, {}).outputs == COLUMNS


@pytest.mark.parametrize(
    ("op_type", "version", "inputs", "attributes"),
    [
        ("Resize", 19, {**X, "": (), "scales": (2,)}, {}),
        ("Resize", 19, {**X, "": (), "scales": (1,)}, {"axes": (0,)}),
        ("Resize", 10, {**X, "scales": (2,)}, {}),
        ("Upsample", 9, {**X, "scales": (2,)}, {}),
        ("Upsample", 7, X, {"scales": (2.0, 1.0)}),
    ],
)
def test_axes_with_scale_1_are_kept(
    op_type: str, version: int, inputs: dict[str, tuple[int, ...]], attributes: dict[str, Any]
) -> None:
    scales = (2.0,) if "axes" in attributes else (2.0, 1.0)
    node = site(op_type, inputs, {"y": (8, 8)}, {"scales": scales}, version, **attributes)
    assert apply_rule(node, COLUMNS, {}).outputs == COLUMNS
