"""Whatever the rule: operators without one, and shapes that depend on data, are named."""

from __future__ import annotations

from tests.plan.horizontal.nodes import COLUMNS, X, Y, assert_said, said, site


def test_an_operator_without_a_rule() -> None:
    assert_said((site("Det", X, Y), COLUMNS, {}, "nothing is known of how Det computes on shards"))


def test_a_shape_that_depends_on_data_is_named() -> None:
    node = site("Relu", X, Y)
    del node.facts.shapes["y"]  # type: ignore[attr-defined]
    assert said(node, COLUMNS).endswith("the shape of its output 0 depends on data")
