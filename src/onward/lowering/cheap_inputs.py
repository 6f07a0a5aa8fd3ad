"""What linear layers read and is cheap to compute: it is computed again for the gradient of the weight, not kept.

What comes out of a norm, of GELU, Swish or SwiGLU is kept by nobody but the products that read it; what went in is kept
anyway. torch's compiler chooses the same for itself, by a minimal cut of the graph of both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from onward.lowering.float8 import float8_product
from onward.lowering.ops import activation, fused, normalization
from onward.lowering.ops.elementwise import add, sub
from onward.lowering.ops.fused_attention import attention
from onward.lowering.ops.fused_cross_entropy import linear_cross_entropy
from onward.lowering.ops.linear import gemm, matmul
from onward.lowering.ops.movement import flatten, identity, reshape, squeeze, transpose, unsqueeze
from onward.lowering.ops.shapes import shape
from onward.lowering.products import gradient_of_weight, multiply
from onward.lowering.program import Program, pick

CHEAP = frozenset(
    {activation.gelu, activation.swish, activation.swiglu, activation.mish, activation.hard_swish, fused.swiglu,
     fused.layer_normalization, fused.rms_normalization, normalization.layer_normalization,
     normalization.rms_normalization}
)  # fmt: skip
"""Functions of a few operations for an element that need their inputs for the backward pass, and not their result."""

KEPT = frozenset({attention})
"""Functions that need their result for the backward pass: a copy of it in another order need not be kept beside it."""

VIEWS = frozenset({pick, reshape, transpose, flatten, identity, squeeze, unsqueeze})
KEEP_NOTHING = frozenset({add, sub, shape, float8_product, linear_cross_entropy})
"""Readers that do not hold their input until the backward pass, or not in full."""

LEAST_BYTES = 2**17
"""Inputs smaller than this are kept: making them again takes longer than all else that a layer so small does."""

PRODUCTS: Mapping[Any, str] = {matmul: "matmul", gemm: "gemm", fused.linear: "linear"}


def with_cheap_inputs(program: Program) -> Program:
    """A program whose linear layers compute cheap inputs again in the backward pass, where nothing else keeps them.

    Args:
        program: a segment's, or a whole graph's; it is left as it is, and so is its code in the result, which is called
            for the names of nodes in errors and profiles.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(program.code.graph, copies))
    groups: dict[tuple[fx.Node, ...], list[fx.Node]] = {}
    for call, steps in _layers(graph, program):
        groups.setdefault(steps, []).append(call)
    if not groups:
        return program
    root: dict[str, Any] = {
        str(node.target): getattr(program.code, str(node.target)) for node in graph.nodes if node.op == "get_attr"
    }
    for index, (steps, calls) in enumerate(groups.items()):
        name = f"cheap_input_{index}"
        root[name], sources = _recipe(steps)
        with graph.inserting_before(calls[0]):
            recipe = graph.call_function(Recipe, (graph.get_attr(name),))
        for call in calls:
            _replace(graph, call, recipe, sources)
    return replace(program, run=fx.GraphModule(root, graph))


def _replace(graph: fx.Graph, call: fx.Node, recipe: fx.Node, sources: Sequence[fx.Node]) -> None:
    left, right, *rest = call.args
    is_transposed = bool(call.kwargs.get("transB") or call.kwargs.get("rows_are_outputs"))
    kind, operands = PRODUCTS[call.target], (left, right, rest[0] if rest else None)
    with graph.inserting_before(call):
        new = graph.call_function(linear_of_cheap, (recipe, kind, is_transposed, *operands, *sources))
    new.meta = dict(call.meta)
    call.replace_all_uses_with(new)
    graph.erase_node(call)


def _layers(graph: fx.Graph, program: Program) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Products whose left operand is cheap and not kept otherwise, and the nodes that make it, views of it last."""
    tensors = set([node for node in graph.nodes if node.op == "placeholder"][2 + len(program.inputs) :])
    products = [node for node in graph.nodes if node.target in PRODUCTS and _is_plain_product(node, tensors)]
    for call in products:
        steps = _steps(call.args[0])
        if steps and not any(_is_kept(step, set(products)) for step in steps):
            yield call, steps


def _is_plain_product(node: fx.Node, tensors: set[fx.Node]) -> bool:
    """Whether a product is of an activation and a weight, and nothing more than that and a bias."""
    right: Any = node.args[1]
    if isinstance(right, fx.Node) and right.target is transpose:
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


def _recipe(steps: tuple[fx.Node, ...]) -> tuple[nn.Module, list[fx.Node]]:
    """The code of some steps, and the nodes that it is called with."""
    own = set(steps)
    sources = list(dict.fromkeys(source for step in steps for source in step.all_input_nodes if source not in own))
    graph = fx.Graph()
    copies = {source: graph.placeholder(source.name) for source in sources}
    for step in steps:
        copies[step] = graph.node_copy(step, lambda source: copies[source])
    graph.output(copies[steps[-1]])
    return fx.GraphModule(nn.Module(), graph), sources


class Recipe:
    """How the operand of some products is made, in one pass; the first that asks makes it, for all of them.

    Args:
        code: makes the operand out of its sources.
    """

    def __init__(self, code: Callable[..., Tensor]) -> None:
        self.code = code
        self.readers = 0
        self._waiting = 0
        self._operand: Tensor | None = None

    def make(self, sources: Sequence[Any]) -> Tensor:
        """The operand, which goes when as many have asked as there are readers."""
        if self._operand is None:
            self._operand, self._waiting = self.code(*sources), self.readers
        operand = self._operand
        self._waiting -= 1
        if not self._waiting:
            self._operand = None
        return operand


def linear_of_cheap(
    recipe: Recipe, kind: str, is_transposed: bool, X: Tensor, W: Tensor, B: Tensor | None, *sources: Any
) -> Tensor:
    """`X W + B` of X [..., K], W [K, N], or [N, K] if `is_transposed`, and B [N]; keeps `sources` and W, but not X.

    Args:
        recipe: makes X of the sources.
        kind: the name of the function that this stands for, which is called where there is nothing to save.
        is_transposed: see W.
        X: what the sources give.
        W: the weight.
        B: the bias.
        sources: tensors and other values; gradients flow through X.
    """
    outputs = W.shape[0 if is_transposed else -1]
    is_layer = (
        (X.dim() == 2 if kind == "gemm" else X.dim() > 1) and W.dim() == 2 and (B is None or B.shape == (outputs,))
    )
    is_trained = torch.is_grad_enabled() and W.requires_grad
    is_large = X.numel() * X.element_size() >= LEAST_BYTES
    if not (is_layer and is_trained and is_large and fused.is_plain(X) and not torch.compiler.is_compiling()):
        return _as_it_was(kind, is_transposed, X, W, B)
    detached = (source.detach() if isinstance(source, Tensor) else source for source in sources)
    recipe.readers += 1
    result: Tensor = _Linear.apply(X, W.T if is_transposed else W, B, recipe, *detached)  # type: ignore[no-untyped-call]
    return result


def _as_it_was(kind: str, is_transposed: bool, X: Tensor, W: Tensor, B: Tensor | None) -> Tensor:
    if kind == "matmul":
        return matmul(X, W)
    if kind == "gemm":
        return gemm(X, W, B, transB=int(is_transposed))
    return fused.linear(X, W, B, rows_are_outputs=int(is_transposed))


class _Linear(torch.autograd.Function):
    """A product with a weight W [K, N], and the sum with a bias [N]; its gradients are those of torch's `addmm`."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, B: Tensor | None, recipe: Recipe, *sources: Any) -> Tensor:
        """Keeps W and what X was made of."""
        device = X.device.type
        ctx.recipe, ctx.dtype, ctx.of_bias = recipe, X.dtype, None if B is None else B.dtype
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.others = [None if isinstance(source, Tensor) else source for source in sources]
        ctx.save_for_backward(W, *(source if isinstance(source, Tensor) else None for source in sources))
        rows = multiply(X.reshape(-1, X.shape[-1]), W, B)
        return rows.view(*X.shape[:-1], rows.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """X again, as it was made, for the gradient of W alone."""
        W, *kept = ctx.saved_tensors
        result = gradients[0]
        rows = result.reshape(-1, result.shape[-1])
        of_x = of_w = of_bias = None
        if ctx.needs_input_grad[1]:  # first, so that X and its gradient are not there at once
            of_w = _of_weight(ctx, rows, W, kept)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(ctx.of_bias)
        if ctx.needs_input_grad[0]:
            of_x = multiply(rows, W.to(rows.dtype).T).reshape(*result.shape[:-1], W.shape[0]).to(ctx.dtype)
        return (of_x, of_w, of_bias, None, *(None for _ in kept))


def _of_weight(ctx: Any, rows: Tensor, W: Tensor, kept: Sequence[Tensor | None]) -> Tensor:
    """The gradient of a weight, which lies as the weight does, from that of the result [M, N]."""
    sources = [other if tensor is None else tensor for tensor, other in zip(kept, ctx.others, strict=True)]
    device, low, is_on = ctx.autocast
    with torch.autocast(device, low, is_on, cache_enabled=False):
        X = ctx.recipe.make(sources).reshape(-1, W.shape[0]).to(rows.dtype)
    return gradient_of_weight(X, rows, W).to(W.dtype)
