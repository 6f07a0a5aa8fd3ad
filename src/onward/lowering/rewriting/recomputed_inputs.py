"""Inputs of linear layers that are cheap to compute: recomputed for the gradient of the weight, not kept.

What comes out of a norm, of GELU, Swish or SwiGLU is kept by nothing but the matmuls that read it; what went in is kept
anyway. torch's compiler chooses the same for itself, by a minimal cut of the graph of both passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch.nn import functional

from onward.graph.shared_inputs import KEEP_APART, is_worth_recomputing
from onward.lowering.building.tensor_facts import fact_about
from onward.lowering.ops import activation, fused, normalization
from onward.lowering.ops.elementwise import add, sub
from onward.lowering.ops.fused_attention import attention
from onward.lowering.ops.fused_cross_entropy import linear_cross_entropy
from onward.lowering.ops.linear import gemm, matmul
from onward.lowering.ops.movement import flatten, identity, reshape, squeeze, transpose, unsqueeze
from onward.lowering.ops.shapes import shape
from onward.lowering.program import Program, pick
from onward.lowering.rewriting.float8 import float8_product
from onward.lowering.rewriting.frozen_weights import extracted, multiply_by_frozen_weight
from onward.lowering.rewriting.linear_layers import Recipe, linear_layers

CHEAP = frozenset(
    {activation.gelu, activation.swish, activation.swiglu, functional.mish, activation.hard_swish, fused.swiglu,
     fused.layer_normalization, fused.rms_normalization, normalization.layer_normalization,
     normalization.rms_normalization}
)  # fmt: skip
"""Functions of a few operations for an element that need their inputs for the backward pass, and not their result."""

KEPT = frozenset({attention})
"""Functions that need their result for the backward pass: a copy of it in another order need not be kept next to it."""

VIEWS = frozenset({pick, reshape, transpose, flatten, identity, squeeze, unsqueeze})
KEEP_NOTHING = frozenset({add, sub, shape, float8_product, linear_cross_entropy, multiply_by_frozen_weight})
"""Readers that do not hold their input until the backward pass, or not in full."""

PRODUCTS: Mapping[Any, str] = {matmul: "matmul", gemm: "gemm", fused.linear: "linear"}


def with_linear_layers(program: Program, recomputes_inputs: bool = True, joins: bool = True) -> Program:
    """A program whose linear layers keep less, and add up the gradient of an input that several of them read.

    Args:
        program: a segment's, or an entire graph's; it is left as it is, and so is its code in the result, which is
            called for the names of nodes in errors and profiles.
        recomputes_inputs: inputs that are cheap and that nothing else keeps are recomputed in the backward pass.
        joins: layers that read the same become one function; not for schedules that compute the gradients of weights
            later than those of inputs, which know a function by its first result.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(program.code.graph, copies))
    tensors = set([node for node in graph.nodes if node.op == "placeholder"][2 + len(program.inputs) :])
    products = [node for node in graph.nodes if node.target in PRODUCTS and _is_plain_product(node, tensors)]
    known = set(products)
    steps = {call: _recomputed_calls(call, known) if recomputes_inputs else () for call in products}
    outputs = _outputs_by_input(products)
    steps = {call: made if _is_worth(made, outputs.get(call.args[0])) else () for call, made in steps.items()}
    groups = _neighbors(graph, products) if joins else [[call] for call in products]
    entered = {group[0] for group in groups if joins and _begins_region(group)}
    groups = [group for group in groups if len(group) > 1 or steps[group[0]] or group[0] in entered]
    if not groups:
        return program
    root: dict[str, Any] = {
        str(node.target): getattr(program.code, str(node.target)) for node in graph.nodes if node.op == "get_attr"
    }
    recipes: dict[tuple[fx.Node, ...], tuple[fx.Node, list[fx.Node]]] = {}
    for group in groups:
        made = steps[group[0]]
        if made and made not in recipes:
            name = f"cheap_input_{len(recipes)}"
            root[name], sources = extracted(made)
            with graph.inserting_before(group[0]):
                recipes[made] = graph.call_function(Recipe, (graph.get_attr(name),)), sources
        recipe, sources = recipes.get(made, (None, []))
        _replace(graph, group, recipe, sources, _entry(group) if group[0] in entered else None)
    return replace(program, run=fx.GraphModule(root, graph))


def _outputs_by_input(products: Sequence[fx.Node]) -> dict[Any, int | None]:
    """Of the layers that read each input together; None where the shape of a weight is not known."""
    found: dict[Any, int | None] = {}
    for call in products:
        (_, is_transposed), W, _ = _layer(call)
        weight, before = fact_about(W), found.get(call.args[0], 0)
        known = weight is not None and before is not None
        found[call.args[0]] = before + weight.shape[0 if is_transposed else 1] if known else None  # type: ignore[operator, union-attr]
    return found


def _is_worth(made: Sequence[fx.Node], outputs: int | None) -> bool:
    """Whether the layers take so long that recomputing what they read adds little; a view takes no time."""
    cheap = [step for step in made if step.target not in VIEWS and "onnx" in step.meta]
    return outputs is None or all(
        is_worth_recomputing(step.meta["onnx"].op_type, outputs, str(step.kwargs.get("approximate", "none")))
        for step in cheap
    )


def _begins_region(group: Sequence[fx.Node]) -> bool:
    """Whether what the layers read enters a region of tensor parallelism there, and nothing else reads it."""
    left = group[0].args[0]
    if not isinstance(left, fx.Node) or "onnx" not in left.meta or set(left.users) != set(group):
        return False
    kind = left.meta["onnx"].op_type
    return "horizontal_group" in left.kwargs and (
        kind == "Enter" or (kind == "GatherTokens" and bool(left.kwargs.get("partial")))
    )


def _entry(group: Sequence[fx.Node]) -> tuple[Any, ...]:
    """What `linear_layers` is told of a region that begins with a group."""
    left: Any = group[0].args[0]
    is_share = "cut_axis" in left.kwargs
    shares = (left.kwargs["cut_axis"], left.kwargs["size"]) if is_share else None
    return left.args[0], left.kwargs["horizontal_group"], shares


def _replace(
    graph: fx.Graph,
    group: Sequence[fx.Node],
    recipe: fx.Node | None,
    sources: Sequence[fx.Node],
    entry: tuple[Any, ...] | None,
) -> None:
    """Replaces all calls by one, where the first of them is."""
    layers = [_layer(call) for call in group]
    kinds, weights, biases = (tuple(layer[place] for layer in layers) for place in range(3))
    arguments = (group[0].args[0], kinds, weights, biases, recipe, tuple(sources), entry)
    with graph.inserting_before(group[0]):
        joined = graph.call_function(linear_layers, arguments)
        joined.meta = dict(group[0].meta)
        results = [graph.call_function(pick, (joined, place)) for place in range(len(group))]
    for call, result in zip(group, results, strict=True):
        result.meta = dict(call.meta)
        call.replace_all_uses_with(result)
        right = call.args[1]
        graph.erase_node(call)
        if isinstance(right, fx.Node) and right.op == "call_function" and not right.users:
            graph.erase_node(right)  # a weight transposed, which the layer takes as it is stored


def _layer(call: fx.Node) -> tuple[tuple[str, bool], Any, Any]:
    """Kind, weight and bias of a plain product, as `linear_layers` wants them."""
    right: Any = call.args[1]
    is_transposed = bool(call.kwargs.get("transB") or call.kwargs.get("rows_are_outputs"))
    if right.op == "call_function":
        right, is_transposed = right.args[0], not is_transposed
    return (PRODUCTS[call.target], is_transposed), right, call.args[2] if len(call.args) > 2 else None


def _neighbors(graph: fx.Graph, products: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Products that read the same, in groups, in order, with nothing between them that keeps them apart."""
    groups: list[list[fx.Node]] = []
    known, is_open = set(products), False
    for node in graph.nodes:
        if node in known:
            if is_open and groups[-1][0].args[0] is node.args[0]:
                groups[-1].append(node)
            else:
                groups.append([node])
            is_open = True
        elif "onnx" in node.meta and node.meta["onnx"].op_type in KEEP_APART:
            is_open = False
    return groups


def _recomputed_calls(call: fx.Node, products: set[fx.Node]) -> tuple[fx.Node, ...]:
    """The nodes that make the left operand of a product, views of it last, if it is cheap and not kept otherwise."""
    steps = _steps(call.args[0])
    return () if any(_is_kept(step, products) for step in steps) else steps


def _is_plain_product(node: fx.Node, tensors: set[fx.Node]) -> bool:
    """Whether a product is of an activation and a weight, and nothing more than that and a bias."""
    right: Any = node.args[1]
    if isinstance(right, fx.Node) and right.target is transpose and right.kwargs.get("perm", (1, 0)) == (1, 0):
        right = right.args[0]
    scales = node.kwargs.get("transA") or node.kwargs.get("alpha", 1.0) != 1.0 or node.kwargs.get("beta", 1.0) != 1.0
    bias = node.args[2] if len(node.args) > 2 else None
    return right in tensors and node.args[0] not in node.args[1:] and not scales and (bias is None or bias in tensors)


def _steps(left: Any) -> tuple[fx.Node, ...]:
    """The nodes that make the operand of a product of what is kept anyway; none where that is not cheap."""
    steps = []
    while isinstance(left, fx.Node) and left.op == "call_function" and left.target in VIEWS:
        steps.append(left)
        left = left.args[0]
    if not isinstance(left, fx.Node) or left.op != "call_function":
        return ()
    if left.target in KEPT:
        return tuple(reversed(steps))
    return (left, *reversed(steps)) if left.target in CHEAP else ()


def _is_kept(step: fx.Node, products: set[fx.Node]) -> bool:
    """Whether somebody else holds what a step gives until the backward pass, or hands it on."""
    for user in step.users:
        if user.op != "call_function":
            return True
        if user in products or user.target in KEEP_NOTHING:
            continue
        if user.target not in VIEWS or _is_kept(user, products):
            return True
    return False
