"""Lookups in a table that the last layer reads, too, as in tied embeddings: their gradient is a few rows of it.

torch makes an entire table of them, mostly zeros, next to the one that the last layer has given, and adds the two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onward.lowering.ops.fused_cross_entropy import linear_cross_entropy
from onward.lowering.ops.indexing import gather, wrap_positions
from onward.lowering.ops.movement import transpose
from onward.lowering.program import Program

LEAST_BYTES = 2**20
"""Gradients of smaller tables are dense: an entire table takes less time than a few rows that have to be found."""


def with_sparse_lookups(program: Program) -> Program:
    """An entire network's program in which lookups give sparse gradients, where the last layer gives a dense one.

    Autograd adds them in place before anybody else sees them: optimizers, hooks and other ranks get the dense sum.
    """
    nodes = program.code.graph.nodes
    tables = {_table(node.args[1]) for node in nodes if node.target is linear_cross_entropy}
    if not any(_reads(node, tables) for node in nodes):
        return program
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(program.code.graph, copies))
    for node, copy in copies.items():
        if _reads(node, tables):
            copy.target = lookup
    return replace(program, code=fx.GraphModule(program.code, graph))


def _table(weight: Any) -> Any:
    is_turned = isinstance(weight, fx.Node) and weight.target is transpose
    return weight.args[0] if is_turned else weight


def _reads(node: fx.Node, tables: set[Any]) -> bool:
    return node.target is gather and node.args[0] in tables and not node.kwargs.get("axis", 0)


def lookup(data: Tensor, indices: Any, *, axis: int = 0) -> Tensor:
    """Rows of data [V, W], as `gather` gives them; the gradient of data is sparse if that is a weight on a CPU."""
    is_weight = data.is_leaf and data.requires_grad and torch.is_grad_enabled() and isinstance(indices, Tensor)
    has_numbers = type(data) in (Tensor, nn.Parameter) or isinstance(data, FakeTensor)
    is_traced = torch.compiler.is_compiling() or get_proxy_mode() is not None
    is_plain = data.dim() == 2 and data.dtype in (torch.float32, torch.float64) and data.device.type == "cpu"
    is_large = data.numel() * data.element_size() >= LEAST_BYTES
    if is_traced or not (is_weight and has_numbers and is_plain and is_large):
        return gather(data, indices, axis=axis)
    rows: Tensor = _Lookup.apply(data, wrap_positions(indices, data.shape[0]))  # type: ignore[no-untyped-call]
    return rows


class _Lookup(torch.autograd.Function):
    """Rows of a table [V, W]."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, positions: Tensor) -> Tensor:
        """Keeps the positions."""
        ctx.save_for_backward(positions)
        ctx.shape = table.shape
        return F.embedding(positions, table)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The rows' gradients and where they belong; equal positions are added one after the other."""
        (positions,) = ctx.saved_tensors
        rows = gradients[0].reshape(-1, ctx.shape[1])
        # As a scope, not as an argument: torch 2.11 does not see the argument, and warns that nobody has chosen.
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            return torch.sparse_coo_tensor(positions.reshape(1, -1), rows, ctx.shape), None
