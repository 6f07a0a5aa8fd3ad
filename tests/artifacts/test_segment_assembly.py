"""Nodes of segments, copied and connected, without tracing."""

from __future__ import annotations

import onnx_ir as ir

from onward.artifacts.joint_segments import SegmentUse
from onward.artifacts.segment_assembly import ChainAssembly, SegmentNodes


def make_value(name: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))


def product() -> SegmentNodes:
    """y = x * w; the gradients of x and of w from that of y."""
    x, w, gradient = (make_value(name) for name in ("x", "w", "gradient"))
    forward = ir.Node("", "Mul", [x, w])
    backward = [ir.Node("", "Mul", [gradient, w]), ir.Node("", "Mul", [gradient, x])]
    outputs = [forward.outputs[0], *(node.outputs[0] for node in backward)]
    return SegmentNodes(inputs=[x, w, gradient], outputs=outputs, forward=[forward], backward=backward)


def use(reads: tuple[str, ...], gives: str, gradients: tuple[str, ...]) -> SegmentUse:
    return SegmentUse(code=0, reads=reads, takes_gradients_of=(gives,), gives=(gives,), gives_gradients_of=gradients)


def test_gradients_flow_from_the_last_use_to_the_first_and_are_summed() -> None:
    values = {name: make_value(name) for name in ("x", "w")}
    chain = ChainAssembly([product()], values)
    chain.gradients["z"] = end = make_value("end")
    chain.assemble([use(("x", "w"), "y", ("x", "w")), use(("y", "w"), "z", ("y", "w"))])
    first, second, of_y, of_w_later, *_, of_w, total = chain.nodes
    assert [node.op_type for node in chain.nodes] == ["Mul"] * 6 + ["Add"]
    assert second.inputs == (first.outputs[0], values["w"])
    assert of_y.inputs == (end, values["w"])
    assert of_w.inputs == (of_y.outputs[0], values["x"])
    assert total.inputs == (of_w_later.outputs[0], of_w.outputs[0])
    assert chain.gradients["w"] is total.outputs[0]
    assert chain.values["z"] is second.outputs[0]


def test_nested_graphs_read_the_values_of_their_own_copy() -> None:
    x, condition = make_value("x"), make_value("condition")
    inner, same = ir.Node("", "Neg", [x]), ir.Node("", "Identity", [x])
    branches = {
        "then_branch": ir.Graph([], [inner.outputs[0]], nodes=[inner]),
        "else_branch": ir.Graph([], [same.outputs[0]], nodes=[same]),
    }
    node = ir.Node("", "If", [condition], [ir.AttrGraph(name, graph) for name, graph in branches.items()])
    segment = SegmentNodes(inputs=[x, condition], outputs=[node.outputs[0]], forward=[node], backward=[])
    values = {name: make_value(name) for name in ("a", "b", "condition")}
    chain = ChainAssembly([segment], values)
    uses = [
        SegmentUse(code=0, reads=(name, "condition"), takes_gradients_of=(), gives=(f"{name}_out",),
                   gives_gradients_of=())
        for name in ("a", "b")
    ]  # fmt: skip
    chain.assemble(uses)
    for copy, name in zip(chain.nodes, ("a", "b"), strict=True):
        for branch in branches:
            assert next(iter(copy.attributes[branch].as_graph())).inputs == (values[name],)
    assert inner.inputs == (x,)
