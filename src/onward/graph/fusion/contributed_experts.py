"""`MoE` of ONNX Runtime as a mixture whose router is written out.

Its meaning is that of onnxruntime's documentation (docs/ContribOperators.md), of its CPU kernel, and of fc3, which that
lacks, of its test of Mixtral.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.fusion.rewriting import Editor
from onward.graph.nodes.known_values import integer
from onward.graph.nodes.node_writer import Attribute
from onward.graph.nodes.structure import MICROSOFT

KIND = "experts"

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu_tanh", "silu": "swish", "identity": "identity"}
"""Of `MoE` -> of the fused node."""


def body_attributes(
    activation_type: str, has_fc3: bool, fusion: int, alpha: float, beta: float, limit: float | None
) -> dict[str, int | float | str]:
    """What the fused node is told of `MoE`'s experts.

    Args:
        activation_type: of the node.
        has_fc3: the hidden layer is `activation(fc1(x)) * fc3(x)`.
        fusion: `swiglu_fusion`: 0: gate and value are fc1 and fc3; 1: they alternate in fc1; 2: they are its halves.
        alpha, beta, limit: of swiglu, `gate * sigmoid(alpha * gate) * (value + beta)`, the gate clipped above the
            limit and the value on both sides.

    Raises:
        ValueError: an activation or a form that is not known.
    """
    if activation_type != "swiglu":
        if activation_type not in _ACTIVATIONS:
            raise ValueError(
                f"activation_type {activation_type!r} is not known; expected swiglu, {', '.join(_ACTIVATIONS)}."
            )
        return {"activation": _ACTIVATIONS[activation_type], "alpha": 1.0, "gated": int(has_fc3)}
    if fusion not in ((0,) if has_fc3 else (1, 2)):
        raise ValueError(
            f"swiglu_fusion is {fusion} {'with' if has_fc3 else 'without'} fc3; known are 0 with fc3 (gate and value "
            "are fc1 and fc3), 1 without (gate and value alternate) and 2 without (one after the other)."
        )
    found: dict[str, int | float | str] = {
        "activation": "swish", "alpha": alpha, "gated": {0: 1, 1: 3, 2: 2}[fusion], "value_shift": beta,
    }  # fmt: skip
    return found if limit is None else {**found, "gate_high": limit, "value_low": -limit, "value_high": limit}


def fuse_contributed(editor: Editor) -> None:
    """Writes out the softmax of the scores and the best of them, and after it the experts."""
    for node in [node for node in editor.graph if node.domain == MICROSOFT and node.op_type == "MoE"]:
        _fuse(editor, node)


def _fuse(editor: Editor, node: ir.Node) -> None:
    inputs: list[ir.Value | None] = [*node.inputs, *[None] * 8]
    x, scores, up, up_bias, down, down_bias, value, value_bias = inputs[:8]
    weights = [up, value, down] if value is not None else [up, down]
    biases = [up_bias, value_bias, down_bias] if value is not None else [up_bias, down_bias]
    attributes = _attributes(node, value is not None)
    shape, rank = (None if up is None else editor.facts.shape(up)), (None if x is None else editor.facts.rank(x))
    if attributes is None or shape is None or scores is None or down is None or len(shape) != 3 or rank not in (2, 3):
        return
    if node.outputs[0].name in editor.kept or len({bias is None for bias in biases}) > 1:
        return
    experts, _, width = shape
    if not isinstance(experts, int) or not isinstance(width, int):
        return
    choices = integer(node, "k", 1)
    shares, chosen = _route(editor, node, scores, choices)
    tokens: ir.Value | None = x
    if rank == 3:
        tokens = editor.write("Reshape", [x, editor.integers([-1, width])], node, name=KIND)
    down_shape = editor.facts.shape(down) or ()
    output = editor.write(
        "Experts",
        [tokens, chosen, shares, *weights, *(bias for bias in biases if bias is not None)],
        node,
        fused=True,
        name=KIND,
        experts=experts,
        rows_are_outputs=1,
        is_biased=int(biases[0] is not None),
        hidden=down_shape[-1] if down_shape and isinstance(down_shape[-1], int) else 0,
        **attributes,
    )
    if rank == 3:
        output = editor.write("Reshape", [output, editor.write("Shape", [x], node, name=KIND)], node, name=KIND)
    editor.replace(node.outputs[0], output, KIND, 1, f"{experts} experts, {choices} for each token")


def _attributes(node: ir.Node, has_fc3: bool) -> dict[str, Attribute] | None:
    given = {name: attribute.value for name, attribute in node.attributes.items()}
    if given.get("use_sparse_mixer", 0):
        return None
    try:
        return dict(
            body_attributes(
                given.get("activation_type", "relu"), has_fc3, given.get("swiglu_fusion", 0),
                given.get("activation_alpha", 1.0), given.get("activation_beta", 0.0), given.get("swiglu_limit"),
            )
        )  # fmt: skip
    except ValueError:  # refused in the words of the operator, when it is lowered
        return None


def _route(editor: Editor, node: ir.Node, scores: ir.Value, choices: int) -> tuple[ir.Value, ir.Value]:
    """The shares and the numbers of each token's experts."""
    probabilities = editor.write("Softmax", [scores], node, name=KIND, axis=-1)
    top = editor.new_node("TopK", [probabilities, editor.integers([choices])], f"fused/{KIND}", outputs=2)
    editor.graph.insert_before(node, top)
    shares = top.outputs[0]
    if integer(node, "normalize_routing_weights", 0):
        total = editor.write("ReduceSum", [shares, editor.integers([-1])], node, name=KIND, keepdims=1)
        shares = editor.write("Div", [shares, total], node, name=KIND)
    return shares, top.outputs[1]
