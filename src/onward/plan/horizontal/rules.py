"""What every operator makes of cut operands: one rule for each, which proves the cut sound or says why it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from onward.plan.horizontal.cuts import Assignment, CannotShardError, Known, NodeContext, Replace
from onward.plan.shards import Sharding


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
    replicated = {index: cut for index, cut in inputs.items() if cut.is_replicated}
    own = {index: cut for index, cut in inputs.items() if index not in replicated}
    if replicated and not own and all(cut.is_replicated for cut in outputs.values()):
        return _on_every_rank(context, replicated)
    assignment = found(context, own, outputs)
    for given, made in ((own, assignment.inputs), (outputs, assignment.outputs)):
        for index, cut in given.items():
            own_cut = made.get(index)
            is_same = own_cut is not None and (own_cut.axis, own_cut.blocks) == (cut.axis, cut.blocks)
            # Of an input, of which several ranks hold the same shard, a rank may read its own share.
            if own_cut is None or not is_same or (given is outputs and not own_cut.has_limits_of(cut)):
                raise CannotShardError(f"{context.name} needs its operand {index} unsharded or sharded in another way")
    if any(isinstance(edit, Replace) and edit.cut.parts for edit in assignment.edits):
        raise CannotShardError(f"{context.name} computes on heads that are fewer than the ranks")
    return replace(assignment, inputs={**replicated, **assignment.inputs})


def _on_every_rank(context: NodeContext, inputs: Known) -> Assignment:
    """What every rank computes in full for its own shards of what follows, so that gradients are parts of a sum.

    Raises:
        CannotShardError: a result is a single number.
    """
    if context.node.op_type in ("Shape", "Size"):
        return Assignment(inputs=inputs, gathers=True)
    shapes = {index: context.result(index) for index in context.outputs()}
    if not all(shapes.values()):
        raise CannotShardError(f"{context.name} reduces what several ranks hold to a single number")
    outputs = {index: Sharding(len(shape) - 1, shape[-1:], (1,)) for index, shape in shapes.items()}
    return Assignment(inputs=inputs, outputs=outputs)
