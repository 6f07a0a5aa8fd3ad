"""Rules of elementwise operators, norms, reductions, pools: what cannot be computed on shards, in words."""

from __future__ import annotations

from typing import Any

import pytest

from onward.plan.horizontal.rules import apply_rule
from onward.plan.shards import Sharding
from tests.plan.horizontal.nodes import COLUMNS, IMAGE, SIZES, Case, X, Y, assert_said, site

CASES: dict[str, Case] = {
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
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_cut_says_why(case: str) -> None:
    assert_said(CASES[case])


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
