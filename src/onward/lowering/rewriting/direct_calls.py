"""Calls of a specialized program whose checks always give the same answer become calls of torch's own functions.

A lowering function looks at shapes and types at every call; in a program for inputs of one shape they are known. Which
calls are direct follows from these alone, so that a run has the same bits each time, and they are the same functions
that the lowering would have called.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from onward.lowering.building.tensor_facts import FACT, TensorFact, fact_about
from onward.lowering.kernels import matmuls, rematerialize
from onward.lowering.kernels.attention import attend
from onward.lowering.kernels.host import flatten as numbers_of
from onward.lowering.ops import (
    activation,
    casting,
    comparison,
    convolution,
    elementwise,
    fused,
    fused_cross_entropy,
    indexing,
    loss,
    movement,
    normalization,
    pooling,
    recurrent,
    reduction,
)
from onward.lowering.ops.fused_attention import attention
from onward.lowering.ops.linear import gemm, matmul
from onward.lowering.program import Program, pick
from onward.lowering.rewriting import direct_losses, direct_recurrent, direct_windows, linear_layers, sparse_lookups

_FLOATS = (torch.float32, torch.float64)


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Rule = Callable[[fx.Node], Call | None]


def with_direct_calls(program: Program) -> Program:
    """The program with direct calls in `run`; its code stays, for the names of nodes in errors and profiles.

    Args:
        program: specialized, of numbers in the model's own types: under autocast a function may choose another.
    """
    source = program.run if isinstance(program.run, fx.GraphModule) else program.code
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(source.graph, copies))
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is linear_layers.linear_layers:
            changed |= _separate(graph, node) or _save(node)
            continue
        rule = _RULES.get(node.target)
        call = None if rule is None else rule(node)
        if call is not None:
            node.target, node.args, node.kwargs = call
            changed = True
    if not changed:
        return program
    for node in list(graph.nodes):
        if node.target is torch.split_with_sizes:
            _split_into_heads(graph, node)
    graph.eliminate_dead_code()
    root = {str(n.target): getattr(source, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
    return replace(program, run=fx.GraphModule(root, graph))


def _is_small(fact: TensorFact) -> bool:
    """Whether nothing that such a tensor is kept for is recomputed; what is larger is left to the lowering."""
    return fact.nbytes < rematerialize.LEAST_BYTES


def _reshaped(node: fx.Node) -> Call | None:
    """Reshape and its kin: the result's shape is known."""
    result, given = fact_about(node), fact_about(node.args[0])
    if result is None or given is None or given.dtype not in (*_FLOATS, torch.int64):
        return None
    return torch.reshape, (node.args[0], result.shape), {}


def _transposed(node: fx.Node) -> Call | None:
    given = fact_about(node.args[0])
    if given is None:
        return None
    order = node.kwargs.get("perm") or tuple(reversed(range(len(given.shape))))
    return torch.permute, (node.args[0], order), {}


def _split(node: fx.Node) -> Call | None:
    parts, given = node.meta.get(FACT), fact_about(node.args[0])
    if given is None or not isinstance(parts, tuple) or not all(isinstance(part, TensorFact) for part in parts):
        return None
    axis: Any = node.kwargs.get("axis", 0)
    sizes = [part.shape[axis] for part in parts]
    if sum(sizes) != given.shape[axis]:
        return None
    return torch.split_with_sizes, (node.args[0], sizes, axis), {}


def _picked(node: fx.Node) -> Call | None:
    return operator.getitem, node.args, {}


def _cast(node: fx.Node) -> Call | None:
    """To the type that a tensor has."""
    given, result = fact_about(node.args[0]), fact_about(node)
    return (movement.identity, (node.args[0],), {}) if given is not None and given == result else None


def _concatenated(node: fx.Node) -> Call | None:
    return torch.cat, (node.args, node.kwargs["axis"]), {}


def _chosen(node: fx.Node) -> Call | None:
    facts = [fact_about(argument) for argument in node.args]
    is_usual = all(fact is not None and fact.dtype in _FLOATS for fact in facts[1:])
    return (torch.where, node.args, {}) if is_usual and facts[0] is not None else None


def _sliced(node: fx.Node) -> Call | None:
    """Along one axis at most, forwards and without gaps."""
    given, result = fact_about(node.args[0]), fact_about(node)
    if given is None or result is None or len(given.shape) != len(result.shape) or node.kwargs:
        return None
    if given == result and all(step > 0 for step in _numbers(node.args[4:])):
        return movement.identity, (node.args[0],), {}
    starts, _, axes, steps = (_numbers(node.args[place : place + 1]) for place in (1, 2, 3, 4))
    if len(starts) != 1 or len(axes) != 1 or any(step != 1 for step in steps):
        return None
    size = given.shape[axes[0]]
    start = slice(starts[0], None).indices(size)[0]
    return torch.narrow, (node.args[0], axes[0], start, result.shape[axes[0]]), {}


def _numbers(arguments: tuple[Any, ...]) -> list[Any]:
    """The numbers of an argument of the host that is given."""
    return [] if not arguments or arguments[0] is None else numbers_of(arguments[0])


def _arithmetic(function: Callable[[Tensor, Tensor], Tensor], with_number: Callable[[Any, Any], Any]) -> Rule:
    """Of two tensors of one float type, or of a tensor and a number."""

    def rule(node: fx.Node) -> Call | None:
        facts, result = [fact_about(argument) for argument in node.args], fact_about(node)
        if len(facts) != 2 or result is None or not _is_small(result):
            return None
        numbers = [argument for argument in node.args if type(argument) in (int, float)]
        if len(numbers) == 1 and result in facts and result.dtype in _FLOATS:
            return with_number, node.args, {}
        if any(fact is None or fact.dtype is not result.dtype or fact.dtype not in _FLOATS for fact in facts):
            return None
        return function, node.args, {}

    return rule


def _activated(function: Callable[..., Tensor], *names: str) -> Rule:
    """A function of one tensor, with these keywords of the call."""

    def rule(node: fx.Node) -> Call | None:
        given = fact_about(node.args[0])
        if given is None or given.dtype not in _FLOATS or not _is_small(given) or set(node.kwargs) - set(names):
            return None
        return function, node.args, dict(node.kwargs)

    return rule


def _layer_norm(node: fx.Node) -> Call | None:
    """Both forms; where there are several outputs, or parameters of another shape or type, it stays."""
    given, scale = fact_about(node.args[0]), fact_about(node.args[1]) if len(node.args) > 1 else None
    bias = node.args[2] if len(node.args) > 2 else None
    if given is None or scale is None or node.kwargs.get("output_count", 1) != 1 or given.dtype not in _FLOATS:
        return None
    axis: Any = node.kwargs.get("axis", -1)
    expected = TensorFact(given.shape[axis % len(given.shape) :], given.dtype)
    if scale != expected or not (bias is None or fact_about(bias) == expected):
        return None
    arguments = (node.args[0], expected.shape, node.args[1], bias, node.kwargs.get("epsilon", 1e-5))
    if node.target is normalization.layer_normalization:  # which gives a tuple of one
        return _norm_alone, arguments, {}
    return torch.layer_norm, arguments, {}


def _norm_alone(*arguments: Any) -> tuple[Tensor]:
    return (torch.layer_norm(*arguments),)


def _attention(node: fx.Node) -> Call | None:
    """Without dropout, and with all queries seeing some key."""
    given: list[Any] = [*node.args, *[None] * (5 - len(node.args))]
    query, key, value, mask, seen = given
    facts, keywords = [fact_about(one) for one in (query, key, value)], node.kwargs
    if seen is not None or keywords.get("dropout_ratio") or any(fact is None or len(fact.shape) != 4 for fact in facts):
        return None
    first = facts[0]
    assert first is not None
    if first.dtype not in _FLOATS or any(fact is None or fact.dtype is not first.dtype for fact in facts):
        return None
    if mask is not None:
        known = fact_about(mask)
        if known is None or len(known.shape) != 4 or known.dtype not in (torch.bool, first.dtype):
            return None
    is_grouped = facts[1] is not None and facts[1].shape[1] != first.shape[1]
    more = {"is_causal": bool(keywords.get("is_causal")), "scale": keywords["scale"], "enable_gqa": is_grouped}
    return attend, (query, key, value, mask), more


def _multiplies_small(X: TensorFact | None, W: TensorFact | None, is_transposed: bool) -> bool:
    """Whether torch multiplies them by itself, keeping X: both are too small for anything else."""
    if X is None or W is None or len(W.shape) != 2 or len(X.shape) < 2 or X.dtype is not W.dtype:
        return False
    outputs, inputs = W.shape if is_transposed else W.shape[::-1]
    flops = 2 * torch.Size(X.shape).numel() * outputs
    return X.dtype in _FLOATS and inputs == X.shape[-1] and flops < matmuls.WORTHWHILE_FLOPS


def _matmul(node: fx.Node) -> Call | None:
    left, right = fact_about(node.args[0]), fact_about(node.args[1])
    return (torch.matmul, node.args, {}) if _multiplies_small(left, right, False) else None


def _linear(node: fx.Node) -> Call | None:
    """A linear layer, or a Gemm that is one."""
    is_gemm = node.target is gemm
    scales = node.kwargs.get("transA") or any(node.kwargs.get(name, 1.0) != 1.0 for name in ("alpha", "beta"))
    fact, is_transposed = fact_about(node.args[0]), bool(node.kwargs.get("transB" if is_gemm else "rows_are_outputs"))
    if scales or fact is None or (is_gemm and len(fact.shape) != 2):
        return None
    return _layer(fact, is_transposed, *node.args[:3])


def _layer(fact: TensorFact, is_transposed: bool, X: Any, W: Any, B: Any = None) -> Call | None:
    """The call for `X W' + B` or, with a weight that is not stored as torch's layers have it, `X W + B`."""
    weight = fact_about(W)
    if weight is None or not _multiplies_small(fact, weight, is_transposed):
        return None
    outputs = weight.shape[0 if is_transposed else 1]
    if B is not None and fact_about(B) != TensorFact((outputs,), weight.dtype):
        return None
    # torch's F.linear without its look at other backends.
    return (torch._C._nn.linear if is_transposed else _linear_of_columns), (X, W, B), {}


def _linear_of_columns(X: Tensor, W: Tensor, B: Tensor | None) -> Tensor:
    return torch._C._nn.linear(X, W.T, B)


def _separate(graph: fx.Graph, joined: fx.Node) -> bool:
    """Replaces layers that read one input too small to be recomputed by one call each."""
    X, kinds, weights, biases = joined.args[:4]
    fact = fact_about(X)
    if fact is None or fact.nbytes >= linear_layers.LEAST_BYTES:
        return False
    calls: list[Call | None] = []
    for (kind, is_transposed), W, B in zip(kinds, weights, biases, strict=True):  # type: ignore[arg-type]
        if kind == "matmul" and not is_transposed:
            calls.append((torch.matmul, (X, W), {}) if _multiplies_small(fact, fact_about(W), False) else None)
        else:
            calls.append(_layer(fact, is_transposed, X, W, B))
    if not all(calls):
        return False
    with graph.inserting_before(joined):
        made = [graph.call_function(*call) for call in calls if call is not None]
    for user in list(joined.users):
        result = made[int(user.args[1])]  # type: ignore[arg-type]
        result.meta = dict(user.meta)
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(joined)
    return True


def _save(joined: fx.Node) -> bool:
    """Calls layers whose input is worth it without looking at shapes."""
    arguments: Any = joined.args[:4]
    X, kinds, weights, biases = arguments
    fact = fact_about(X)
    if fact is None or fact.dtype not in _FLOATS or fact.nbytes < linear_layers.LEAST_BYTES:
        return False
    known = {value: fact_about(value) for value in (*weights, *biases) if value is not None}
    facts = {value: one for value, one in known.items() if one is not None and one.dtype is fact.dtype}
    if len(facts) < len(known):
        return False
    of_weights, of_biases = [facts[W] for W in weights], [None if B is None else facts[B] for B in biases]
    if not linear_layers.have_shapes_of_layers(fact, kinds, of_weights, of_biases):
        return False
    joined.target = linear_layers.checked_layers
    return True


def _split_into_heads(graph: fx.Graph, split: fx.Node) -> None:
    """Equal parts of the last axis that all get the same two axes for it, as queries, keys and values do: in one step.

    Each part is the same view then, and their gradients are put together by the same copy.
    """
    X, sizes, axis = split.args
    fact, parts = fact_about(X), list(split.users)
    reshapes = [user for part in parts for user in part.users]
    if fact is None or axis not in (-1, len(fact.shape) - 1) or len({*sizes}) != 1:  # type: ignore[misc]
        return
    if any(len(part.users) != 1 or part.target is not operator.getitem for part in parts):
        return
    shapes = {tuple(one.args[1]) for one in reshapes if one.target is torch.reshape}  # type: ignore[arg-type]
    if len(shapes) != 1 or any(one.target is not torch.reshape for one in reshapes):
        return
    (shape,) = shapes
    lead = fact.shape[:-1]
    if shape[: len(lead)] != lead or len(shape) != len(lead) + 2:
        return
    with graph.inserting_before(split):
        view = graph.call_function(torch.reshape, (X, (*lead, len(sizes), *shape[len(lead) :])))  # type: ignore[arg-type]
        heads = graph.call_function(torch.unbind, (view, len(lead)))
    for part, reshape in zip(parts, reshapes, strict=True):
        with graph.inserting_before(reshape):
            head = graph.call_function(operator.getitem, (heads, part.args[1]))
        head.meta = dict(reshape.meta)
        reshape.replace_all_uses_with(head)
    for node in (*reshapes, *parts, split):
        graph.erase_node(node)


_RULES: Mapping[Any, Rule] = {
    pick: _picked,
    **dict.fromkeys((movement.reshape, movement.flatten, movement.unsqueeze, movement.squeeze), _reshaped),
    movement.transpose: _transposed,
    **dict.fromkeys((movement.split, movement.split_13, movement.split_2), _split),
    **dict.fromkeys((movement.concat, movement.concat_1), _concatenated),
    movement.slice_: _sliced,
    casting.cast: _cast,
    comparison.where: _chosen,
    elementwise.add: _arithmetic(torch.add, operator.add),
    elementwise.sub: _arithmetic(torch.sub, operator.sub),
    elementwise.mul: _arithmetic(torch.mul, operator.mul),
    elementwise.div: _arithmetic(torch.true_divide, elementwise.quotient),
    activation.gelu: _activated(F.gelu, "approximate"),
    activation.relu: _activated(torch.relu),
    normalization.layer_normalization: _layer_norm,
    fused.layer_normalization: _layer_norm,
    convolution.conv: direct_windows.convolution,
    pooling.max_pool: direct_windows.max_pooling,
    **dict.fromkeys((indexing.gather, sparse_lookups.lookup), direct_losses.lookup),
    loss.softmax_cross_entropy_loss: direct_losses.cross_entropy,
    **dict.fromkeys(reduction.FORMS["ReduceMean"], direct_losses.squared_error),
    fused_cross_entropy.linear_cross_entropy: direct_losses.linear_cross_entropy,
    **dict.fromkeys((recurrent.rnn, recurrent.gru, recurrent.lstm), direct_recurrent.recurrent_layer),
    attention: _attention,
    matmul: _matmul,
    gemm: _linear,
    fused.linear: _linear,
}
