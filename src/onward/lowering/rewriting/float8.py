"""Matmuls with weights in FP8: which calls of a program become one, its values and its gradients.

What is multiplied is in 8 bits, what comes out is not: float8 formats and the choice of e4m3 for values and e5m2 for
gradients as in Micikevicius et al., 2022, "FP8 Formats for Deep Learning".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from onward.lowering.ops.fused import linear
from onward.lowering.ops.fused_cross_entropy import linear_cross_entropy
from onward.lowering.ops.linear import gemm, matmul
from onward.lowering.ops.movement import transpose
from onward.lowering.passes import only_first_derivative
from onward.lowering.program import Program

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
"""Element types of activations and weights, and of the gradients of results."""

MULTIPLE = 16
"""Both sizes of a weight have to divide by this, which is how GPUs multiply in FP8."""

TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Float8Products:
    """What became of the products of a program.

    Attributes:
        program: with products in 8 bits.
        weights: of the products that are.
        others: weights of products that are not -> why, in words.
    """

    program: Program
    weights: tuple[str, ...]
    others: Mapping[str, str]


def with_float8_products(program: Program, tensors: Mapping[str, Tensor]) -> Float8Products:
    """A program whose products of an activation with a weight, a matrix, are computed in FP8.

    Args:
        program: general or specialized; it is left as it is.
        tensors: what it is called with: the types and shapes of the tensors that it reads.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(program.code.graph, copies))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    names = dict(zip(placeholders[2 + len(program.inputs) :], program.tensors, strict=True))
    done: list[str] = []
    others: dict[str, str] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (matmul, gemm, linear, linear_cross_entropy):
            continue
        name = _weight_of(node, names)
        if name is None:
            continue
        obstacle = _obstacle(node, program.tensor(name, tensors))
        if obstacle is not None:
            others[name] = obstacle
            continue
        with graph.inserting_before(node):
            call = graph.call_function(float8_product, *_operands(node))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        done.append(name)
    code = fx.GraphModule(program.code, graph)
    return Float8Products(replace(program, code=code), tuple(dict.fromkeys(done)), others)


def _weight_of(node: fx.Node, names: Mapping[fx.Node, str]) -> str | None:
    """The tensor of the model that is the right-hand side of a product, as it is stored or transposed."""
    right: Any = node.args[1]
    if isinstance(right, fx.Node) and right.target is transpose:
        right = right.args[0]
    return names.get(right) if isinstance(right, fx.Node) else None


def _obstacle(node: fx.Node, weight: Tensor) -> str | None:
    """Why a product cannot be computed in 8 bits; None: it can."""
    if node.target is linear_cross_entropy:
        return "it is computed with the loss, in chunks"
    if weight.dim() != 2:
        return f"it has {weight.dim()} axes, a matrix has 2"
    if weight.dtype not in TYPES:
        return f"it is {str(weight.dtype).removeprefix('torch.')}"
    odd = [size for size in weight.shape if size % MULTIPLE]
    if odd:
        return f"{' and '.join(map(str, odd))} of {weight.shape[0]}x{weight.shape[1]} does not divide by {MULTIPLE}"
    if node.kwargs.get("transA") or node.kwargs.get("alpha", 1.0) != 1.0 or node.kwargs.get("beta", 1.0) != 1.0:
        return "its Gemm scales or transposes what is no weight"
    return None


def _operands(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    left, right, *rest = node.args
    is_transposed = bool(node.kwargs.get("transB") or node.kwargs.get("rows_are_outputs"))
    return (left, right, *rest), {"is_transposed": is_transposed}


def float8_product(X: Tensor, W: Tensor, B: Tensor | None = None, *, is_transposed: bool = False) -> Tensor:
    """`X W + B`, X and W rounded to e4m3 with one scale each, the product summed up in fp32 or better.

    Args:
        X: [..., K].
        W: [K, N], or [N, K] if `is_transposed`; K and N divide by 16.
        B: what is added, as it is.
        is_transposed: see W.

    Returns:
        [..., N], in the type of X, or of autocast where that is on. Gradients of X and W come from that of the result
        rounded to e5m2, and from X and W as they were rounded.
    """
    kind = X.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else X.dtype
    right = W.t() if is_transposed else W
    product: Tensor = _Product.apply(X.reshape(-1, X.shape[-1]), right, dtype)  # type: ignore[no-untyped-call]
    product = product.reshape(*X.shape[:-1], right.shape[1])
    return product if B is None else product + B.to(dtype)


class _Product(torch.autograd.Function):
    """A product of matrices, X [M, K] and W [K, N]."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, dtype: torch.dtype) -> Tensor:
        """Keeps both operands in 8 bits for the backward pass."""
        x, x_scale = quantize(X, VALUES)
        w, w_scale = quantize(W, VALUES)
        ctx.save_for_backward(x, x_scale, w, w_scale)
        ctx.dtypes = X.dtype, W.dtype
        return _multiply(x, w, x_scale, w_scale, dtype)

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The products `G W'` and `X' G`."""
        x, x_scale, w, w_scale = ctx.saved_tensors
        g, g_scale = quantize(gradients[0], GRADIENTS)
        of_x = of_w = None
        if ctx.needs_input_grad[0]:
            of_x = _multiply(g, w.t(), g_scale, w_scale, ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            rows = -x.shape[0] % MULTIPLE  # this product sums over the rows; rows of zeros add nothing
            if rows:
                x, g = _with_rows(x, rows), _with_rows(g, rows)
            of_w = _multiply(x.t(), g, x_scale, g_scale, ctx.dtypes[1])
        return of_x, of_w, None


def quantize(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor in 8 bits, and the fp32 scale by which it is to be multiplied: its largest number becomes the format's.

    A tensor with an infinity or NaN among its numbers becomes NaN, so that it is seen as not finite.
    """
    largest = torch.finfo(dtype).max
    amount = tensor.abs().amax().float()
    # A scale that is no normal number would lose digits, or be zero.
    scale = (amount / largest).clamp(min=torch.finfo(torch.float32).tiny)
    return (tensor.float() / scale).clamp(-largest, largest).to(dtype), scale


def _multiply(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two matrices in 8 bits. GPUs want the left one row by row, the right one column by column."""
    columns = right.t().contiguous().t()
    if left.is_cuda:
        return _scaled(left.contiguous(), columns, left_scale, right_scale, dtype)
    # On a CPU torch multiplies wider numbers, in 16 bits where these are asked for or autocast is on.
    with torch.autocast(left.device.type, enabled=False):
        return _scaled(left.contiguous(), columns, left_scale, right_scale, torch.float32).to(dtype)


def _scaled(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    product: Tensor = torch._scaled_mm(left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype)
    return product


def _with_rows(matrix: Tensor, count: int) -> Tensor:
    """A matrix with rows of zeros after its own; FP8 matmuls know neither padding nor joining."""
    padded = torch.zeros(matrix.shape[0] + count, matrix.shape[1], dtype=torch.uint8, device=matrix.device)
    padded[: matrix.shape[0]] = matrix.view(torch.uint8)
    return padded.view(matrix.dtype)


def why_not(device: torch.device) -> str | None:
    """Why a device cannot multiply in FP8, in a sentence; None: it can."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            name = torch.cuda.get_device_name(device)
            return (
                f"{name} (compute capability {capability[0]}.{capability[1]}) has no FP8 matmuls; they "
                "need an Ada, Hopper or newer GPU (8.9 or higher)."
            )
    try:
        ones = torch.ones(MULTIPLE, MULTIPLE, device=device, dtype=torch.bfloat16)
        scale = torch.ones((), device=device)
        _multiply(ones.to(GRADIENTS), ones.to(VALUES), scale, scale, torch.bfloat16)
    except Exception as error:  # torch has no one class for what a device lacks
        return f"torch {torch.__version__} has no FP8 matmuls here ({str(error).strip().splitlines()[0]})."
    return None
