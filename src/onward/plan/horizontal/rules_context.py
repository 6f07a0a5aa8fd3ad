"""Rules of the operators that context parallelism puts into a graph before tensor parallelism cuts it."""

from __future__ import annotations

from dataclasses import replace

from onward.plan.horizontal.cuts import DOMAIN, Assignment, Known, Link, NodeContext, Replace, follow
from onward.plan.horizontal.rules import rule
from onward.plan.horizontal.rules_elementwise import dropout, elementwise
from onward.plan.horizontal.rules_fused import fused_attention

rule("ContextSum", domains=(DOMAIN,))(elementwise)


@rule("ContextPart", "ContextGather", "ContextHalo", "ContextTrim", domains=(DOMAIN,))
def sequence(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis but that of the sequence."""
    own = int(context.attribute("cut_axis"))
    links = [Link({0: axis}, {0: axis}) for axis in range(len(context.result())) if axis != own]
    return follow(links, context, inputs, outputs, "sequence")


@rule("ContextAttention", domains=(DOMAIN,))
def attention(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Heads; with dropout inside, the ranks draw different numbers."""
    return _under_its_own_name("ContextAttention", fused_attention(context, inputs, outputs))


@rule("ContextDropout", domains=(DOMAIN,))
def own_dropout(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis; the ranks then draw different numbers."""
    return _under_its_own_name("ContextDropout", dropout(context, inputs, outputs))


def _under_its_own_name(op_type: str, found: Assignment) -> Assignment:
    """The node stays an operator of context parallelism, and is told how tensor-parallel ranks share it besides."""
    edits = tuple(replace(edit, op_type=op_type) if isinstance(edit, Replace) else edit for edit in found.edits)
    return replace(found, edits=edits)
