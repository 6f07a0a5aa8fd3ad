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

from onward.lowering.building.tensor_facts import FACT, fact_about
from onward.lowering.ops.fused_cross_entropy import linear_cross_entropy
from onward.lowering.ops.indexing import gather, wrap_positions
from onward.lowering.ops.movement import transpose
from onward.lowering.passes import only_first_derivative
from onward.lowering.program import Program, pick

LEAST_BYTES = 2**20
"""Gradients of smaller tables are dense: an entire table takes less time than a few rows that have to be found."""


def with_sparse_lookups(program: Program) -> Program:
    """An entire network's program in which lookups give sparse gradients, where the last layer gives a dense one.

    They are added in place before anybody else sees them: optimizers, hooks and other ranks get the dense sum.
    """
    nodes = program.code.graph.nodes
    tables = {_table(node.args[1]) for node in nodes if node.target is linear_cross_entropy}
    if not any(_reads(node, tables) for node in nodes):
        return program
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(program.code.graph, copies))
    for table in dict.fromkeys(node.args[0] for node in nodes if _reads(node, tables)):
        assert isinstance(table, fx.Node)
        _split(graph, copies[table])
    return replace(program, code=fx.GraphModule(program.code, graph))


def _split(graph: fx.Graph, table: fx.Node) -> None:
    """Lets the lookups of a table read one copy of it, and the last layers another, whose gradients are added."""
    lookups = [node for node in table.users if _reads(node, {table})]
    layers = [node for node in graph.nodes if node.target is linear_cross_entropy and _table(node.args[1]) is table]
    turned = dict.fromkeys(node.args[1] for node in layers if node.args[1] is not table)
    readers = {*lookups, *layers, *turned}
    for node in lookups:
        node.target = lookup
    fact = fact_about(table)
    if fact is not None and fact.nbytes < LEAST_BYTES:
        return
    with graph.inserting_before(next(node for node in graph.nodes if node in readers)):
        both = graph.call_function(split_table, (table,))
        first, second = (graph.call_function(pick, (both, place)) for place in range(2))
    for part in (first, second):
        part.meta.update({FACT: fact} if fact is not None else {})
    for node in lookups:
        node.replace_input_with(table, first)
    for layer in layers:
        weight = layer.args[1]
        if weight is not table:  # the table transposed, which others may read, too
            with graph.inserting_before(layer):
                own = graph.node_copy(weight)
            own.replace_input_with(table, second)
            layer.update_arg(1, own)
        else:
            layer.replace_input_with(table, second)
    for node in turned:
        if not node.users:
            graph.erase_node(node)


def _table(weight: Any) -> Any:
    is_turned = isinstance(weight, fx.Node) and weight.target is transpose
    return weight.args[0] if is_turned else weight


def _reads(node: fx.Node, tables: set[Any]) -> bool:
    return node.target is gather and node.args[0] in tables and not node.kwargs.get("axis", 0)


def lookup(data: Tensor, indices: Any, *, axis: int = 0) -> Tensor:
    """Rows of data [V, W], as `gather` gives them; the gradient of data is sparse if that is a weight on a CPU."""
    if not isinstance(indices, Tensor) or not _takes_sparse_gradients(data):
        return gather(data, indices, axis=axis)
    rows: Tensor = _Lookup.apply(data, wrap_positions(indices, data.shape[0]))  # type: ignore[no-untyped-call]
    return rows


def split_table(table: Tensor) -> tuple[Tensor, Tensor]:
    """A table for lookups and for the last layer; the sparse gradient of one is added to the other's in place."""
    if not _takes_sparse_gradients(table):
        return table, table
    first, second = _Split.apply(table)  # type: ignore[no-untyped-call]
    return first, second


def _takes_sparse_gradients(data: Tensor) -> bool:
    """Whether it is a large weight on a CPU that has a gradient, or what `split_table` made of one."""
    is_weight = data.is_leaf or isinstance(data.grad_fn, _Split._backward_cls)
    is_weight = is_weight and data.requires_grad and torch.is_grad_enabled()
    has_numbers = type(data) in (Tensor, nn.Parameter) or isinstance(data, FakeTensor)
    is_traced = torch.compiler.is_compiling() or get_proxy_mode() is not None
    is_traced = is_traced or torch._C._are_functorch_transforms_active()
    is_plain = data.dim() == 2 and data.dtype in (torch.float32, torch.float64) and data.device.type == "cpu"
    is_large = data.numel() * data.element_size() >= LEAST_BYTES
    return is_weight and has_numbers and is_plain and is_large and not is_traced


class _Split(torch.autograd.Function):
    """A table, twice.

    Autograd of torch 2.13 would write the sum of both gradients, of which the dense one comes first, into new memory.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> tuple[Tensor, Tensor]:
        """Shares the memory of the table."""
        ctx.set_materialize_grads(False)
        return table.detach(), table.detach()

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        """Writes into the gradient of the second, which only the last layer knows."""
        rows, dense = gradients
        if rows is None or dense is None:  # a sparse gradient is for this sum alone: nobody else expects one
            return dense if rows is None else rows.to_dense()
        return dense.add_(rows)


class _Lookup(torch.autograd.Function):
    """Rows of a table [V, W]."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, positions: Tensor) -> Tensor:
        """Keeps the positions."""
        ctx.save_for_backward(positions)
        ctx.shape = table.shape
        return F.embedding(positions, table)

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The rows' gradients and where they belong; equal positions are added one after the other."""
        (positions,) = ctx.saved_tensors
        rows = gradients[0].reshape(-1, ctx.shape[1])
        # As a scope, not as an argument: torch 2.11 does not see the argument, and warns that nobody has chosen.
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            return torch.sparse_coo_tensor(positions.reshape(1, -1), rows, ctx.shape), None
