"""Nodes by themselves, with the shapes of their operands, and what their rule says of cuts."""

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
X, Y = {"x": SIZES}, {"y": SIZES}
COLUMNS = {0: Sharding(1, (8,))}
IMAGE = (2, 8, 6, 6)
Case = tuple[NodeContext, Mapping[int, Sharding], Mapping[int, Sharding], str]
"""A node, cuts of its inputs and outputs that are known, and words of what is said of it."""


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
    return NodeContext(
        node, version, Facts(shapes={**inputs, **outputs}, numbers=numbers or {}, from_inputs=frozenset(inputs))
    )


def said(
    node: NodeContext, inputs: Mapping[int, Sharding] | None = None, outputs: Mapping[int, Sharding] | None = None
) -> str:
    with pytest.raises(CannotShardError) as caught:
        apply_rule(node, inputs or {}, outputs or {})
    return str(caught.value)


def assert_said(case: Case) -> None:
    node, inputs, outputs, words = case
    message = said(node, inputs, outputs)
    assert words in message
    assert message.startswith("node 'n' (")
