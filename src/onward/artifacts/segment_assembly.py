"""A training graph put together from segments of a network: nodes of equal ones are copied, not traced again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.artifacts.joint_graph import JointGraph
from onward.artifacts.joint_segments import SegmentUse
from onward.graph.cuts import reads


@dataclass(frozen=True, kw_only=True)
class SegmentNodes:
    """Forward and backward pass of a segment as nodes, from which copies are made.

    Attributes:
        inputs, outputs: in the order of the segment's code.
        forward, backward: the nodes in order; what is read by the backward pass alone belongs to it.
    """

    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    forward: Sequence[ir.Node]
    backward: Sequence[ir.Node]


def take_segments(graph: ir.Graph, joint: JointGraph) -> list[SegmentNodes]:
    """The nodes of every segment's code, of a graph that computes all of them next to each other."""
    inputs, outputs, found = list(graph.inputs), list(graph.outputs), list[SegmentNodes]()
    gives = {use.code: len(use.gives) for use in joint.uses}
    gives_in_all = {use.code: len(use.gives) + len(use.gives_gradients_of) for use in joint.uses}
    for number, code in enumerate(joint.codes):
        own_inputs, inputs = inputs[: len(code.examples)], inputs[len(code.examples) :]
        own_outputs, outputs = outputs[: gives_in_all[number]], outputs[gives_in_all[number] :]
        forward = _nodes_before(own_outputs[: gives[number]])
        backward = _nodes_before(own_outputs) - forward
        found.append(
            SegmentNodes(
                inputs=own_inputs,
                outputs=own_outputs,
                forward=[node for node in graph if node in forward],
                backward=[node for node in graph if node in backward],
            )
        )
    assert not inputs
    assert not outputs
    return found


def _nodes_before(values: Sequence[ir.Value]) -> set[ir.Node]:
    """All nodes that values are computed by."""
    found, stack = set[ir.Node](), [value.producer() for value in values]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [value.producer() for value in reads(node)]
    return found


class ChainAssembly:
    """Copies the nodes of segments, and connects what one hands on with what another takes."""

    def __init__(self, segments: Sequence[SegmentNodes], values: Mapping[str, ir.Value]) -> None:
        self.nodes: list[ir.Node] = []
        self.values = dict(values)
        self.gradients: dict[str, ir.Value] = {}
        self._segments = segments

    def assemble(self, uses: Sequence[SegmentUse]) -> None:
        """Appends the forward pass of all segments in order, then their backward pass in the opposite order.

        After this `values` has what segments computed and the new running statistics, `gradients` those of weights.
        """
        copies = []
        for use in uses:
            segment = self._segments[use.code]
            copy = dict(zip(segment.inputs, (self.values[name] for name in use.reads), strict=False))
            self._copy(segment.forward, copy)
            self.values |= {name: copy.get(v, v) for name, v in zip(use.gives, segment.outputs, strict=False)}
            copies.append(copy)
        for use, copy in reversed(list(zip(uses, copies, strict=True))):
            segment = self._segments[use.code]
            gradients = [self.gradients[name] for name in use.takes_gradients_of]
            copy |= dict(zip(segment.inputs[len(use.reads) :], gradients, strict=True))
            self._copy(segment.backward, copy)
            for name, value in zip(use.gives_gradients_of, segment.outputs[len(use.gives) :], strict=True):
                self._add_gradient(name, copy.get(value, value))

    def _add_gradient(self, name: str, value: ir.Value) -> None:
        """Several segments may read one value: its gradient is the sum, that of the last of them first."""
        before = self.gradients.get(name)
        if before is not None:
            node = ir.Node("", "Add", [before, value])
            node.outputs[0].type = value.type
            self.nodes.append(node)
            value = node.outputs[0]
        self.gradients[name] = value

    def _copy(self, nodes: Sequence[ir.Node], copy: dict[ir.Value, ir.Value]) -> None:
        """Appends copies of nodes; `copy` has what their inputs become, and then also their outputs."""
        for node in nodes:
            attributes = [_copied(attribute, copy) for attribute in node.attributes.values()]
            inputs = [None if value is None else copy.get(value, value) for value in node.inputs]
            made = ir.Node(
                node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs), version=node.version
            )
            for old, new in zip(node.outputs, made.outputs, strict=True):
                new.type, new.shape, new.name = old.type, old.shape, old.name
                copy[old] = new
            self.nodes.append(made)


def _copied(attribute: ir.Attr, copy: Mapping[ir.Value, ir.Value]) -> ir.Attr:
    if attribute.type is not ir.AttributeType.GRAPH:
        return attribute
    graph = attribute.as_graph().clone(allow_outer_scope_values=True)
    for node in ir.traversal.RecursiveGraphIterator(graph):
        for index, value in enumerate(node.inputs):
            if value is not None and value in copy:
                node.replace_input_with(index, copy[value])
    return ir.AttrGraph(attribute.name, graph)
