"""Linear layers that read the same value, as queries, keys and values do: in training one function computes them all.

`lowering/rewriting/recomputed_inputs.py` joins them, in the code of a pass; here they are counted, for the user.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from onward.graph.operators import Fact, operators_with

_PRODUCTS = operators_with(Fact.MATMUL) - {"Einsum"}
KEEP_APART = operators_with(Fact.MATMUL | Fact.CONVOLUTION | Fact.RECURRENT | Fact.CONTROL_FLOW) | {
    "Attention",
    "Softmax",
}
"""Operators that keep layers apart which are before and after them: one result would wait long for the other.

So would keys and values of every layer of a decoder, which read the same result of an encoder.
"""

LEAST_OUTPUTS: Mapping[str, int] = {
    "LayerNormalization": 512,
    "RMSNormalization": 512,
    "Mish": 512,
    "Gelu by tanh": 540,
}
"""Operator -> outputs of all layers together that read its result, from which on the layers recompute it in training.

Their products are 6 operations for each output and element of the result, in both passes: 37 ps on the machine of the
census. A norm takes 0.8 ns an element there, GELU by the error function 0.4, by tanh 2.0. With fewer outputs,
recomputing an activation takes a tenth of the layers' time and more, or a norm, whose result is smaller than most
activations, a twentieth.
"""
_LEAST_OUTPUTS_OF_ACTIVATIONS = 128


def is_worth_recomputing(op_type: str, outputs: int, approximate: str = "none") -> bool:
    """Whether layers of so many outputs recompute what they read, the result of an operator that is cheap.

    Args:
        op_type: of the operator.
        outputs: of all layers that read its result, together.
        approximate: how a GELU is computed.
    """
    kind = f"{op_type} by {approximate}" if approximate != "none" else op_type
    return not LEAST_OUTPUTS or outputs >= LEAST_OUTPUTS.get(kind, _LEAST_OUTPUTS_OF_ACTIVATIONS)


def layers_that_read_the_same(graph: ir.Graph, weights: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """The results of such layers, group by group, in the graph's order.

    Args:
        graph: prepared for training, fused or not.
        weights: that train.
    """
    groups: list[tuple[ir.Value, list[str]]] = []
    is_open, known = False, frozenset(weights)
    for node in graph:
        if node.op_type not in KEEP_APART:
            continue
        left = node.inputs[0] if _is_layer(node, known) else None
        if left is not None and is_open and groups[-1][0] is left:
            groups[-1][1].append(str(node.outputs[0].name))
        elif left is not None:
            groups.append((left, [str(node.outputs[0].name)]))
        is_open = left is not None
    return tuple(tuple(names) for _, names in groups if len(names) > 1)


def note_on_joined(groups: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """One sentence that counts them; none where there are none."""
    if not groups:
        return ()
    layers = sum(map(len, groups))
    return (
        f"speed.join_layers: {layers} linear layers with the same input as others are computed in {len(groups)} "
        f"group{'s' if len(groups) > 1 else ''}, with one sum of gradients each.",
    )


def _is_layer(node: ir.Node, weights: frozenset[str]) -> bool:
    """Whether a node is a product of something computed with a weight, as it is stored or transposed."""
    if node.op_type not in _PRODUCTS or len(node.inputs) < 2 or node.inputs[0] is None:
        return False
    right = node.inputs[1]
    maker = None if right is None else right.producer()
    if maker is not None and maker.op_type == "Transpose":
        right = maker.inputs[0]
    return right is not None and right.name in weights and not node.inputs[0].is_initializer()
