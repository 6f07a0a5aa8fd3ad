"""What every operator makes of cut operands: one rule for each, which proves the cut sound or says why it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from onward.plan.horizontal.cuts import Assignment, CannotShardError, Known, NodeContext


class Rule(Protocol):
    """From the cuts that are known of a node's inputs and outputs to those of all its operands.

    Raises:
        CannotShardError: the node cannot compute on them.
    """

    def __call__(self, context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
        """Completes the cuts of one node."""
        ...


_rules: dict[tuple[str, str], Rule] = {}


def rule(*op_types: str, domains: tuple[str, ...] = ("",)) -> Callable[[Rule], Rule]:
    """Registers the rule of some operators."""

    def register(function: Rule) -> Rule:
        for domain in domains:
            for op_type in op_types:
                assert (domain, op_type) not in _rules, f"two rules for {domain}::{op_type}"
                _rules[domain, op_type] = function
        return function

    return register


def apply_rule(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Completes the cuts of a node by its operator's rule, and checks that it kept to what was known.

    Raises:
        CannotShardError: the operator has no rule, or cannot compute on what is cut.
    """
    node = context.node
    found = _rules.get((node.domain, node.op_type))
    if found is None:
        raise CannotShardError(f"{context.name}: nothing is known of how {node.op_type} computes on shards")
    assignment = found(context, inputs, outputs)
    for given, made in ((inputs, assignment.inputs), (outputs, assignment.outputs)):
        for index, cut in given.items():
            if made.get(index) != cut:
                raise CannotShardError(f"{context.name} needs its operand {index} unsharded or sharded in another way")
    return assignment
