"""Direct calls of recurrent layers: torch's fused function on the weights that a file's own were put together from.

ONNX has the gates in another order than torch, so that exporters cut and join torch's weights, and the lowering does it
again the other way. Where both together lead back to stored weights, these are read as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from onward.lowering.building.tensor_facts import fact_about
from onward.lowering.ops import recurrent
from onward.lowering.ops.movement import identity

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_FLOATS = (torch.float32, torch.float64)
_MOVES = frozenset({torch.narrow, torch.cat, torch.reshape, torch.permute, identity})
_DEFAULTS = {
    "activation_alpha": None, "activation_beta": None, "clip": None, "input_forget": 0,
    "layout": 0,
}  # fmt: skip
_LARGEST = 2**24
"""Elements of weights that are followed one by one, at most."""


def recurrent_layer(node: fx.Node) -> Call | None:
    """An RNN, GRU or LSTM that torch's fused function computes, forwards or in both directions."""
    count = 2 if node.target is recurrent.lstm else 1
    inputs: list[Any] = [*node.args, *[None] * (8 - len(node.args))]
    X, W, R, B, lengths, *more = inputs
    given: Any = node.kwargs
    fact, direction = fact_about(X), given.get("direction", "forward")
    if lengths is not None or any(value is not None for value in more[count:]):
        return None
    if fact is None or fact.dtype not in _FLOATS or direction not in ("forward", "bidirectional"):
        return None
    if any(given.get(name, usual) != usual for name, usual in _DEFAULTS.items()):
        return None
    if node.target is recurrent.gru and not given.get("linear_before_reset"):
        return None
    named = given.get("activations")
    if named is not None and (node.target is not recurrent.rnn or {*named} != {"Tanh"}):
        return None
    backwards = direction == "bidirectional"
    run, order = _FUSED[node.target]
    weights = _stored(W, R, B, order, 1 + backwards)
    if weights is None:
        return None
    return run, (X, tuple(more[:count]), tuple(weights), B is not None, 1 + backwards), {}


def _lstm(*arguments: Any) -> tuple[Tensor, ...]:
    return _run(torch.lstm, *arguments)


def _gru(*arguments: Any) -> tuple[Tensor, ...]:
    return _run(torch.gru, *arguments)


def _rnn(*arguments: Any) -> tuple[Tensor, ...]:
    return _run(torch.rnn_tanh, *arguments)


def _run(
    function: Any, X: Tensor, states: tuple[Tensor | None, ...], weights: Sequence[Tensor], has_bias: bool, count: int
) -> tuple[Tensor, ...]:
    """Y [T, D, N, H] and the last states [D, N, H] of X [T, N, I], in D directions; states that are absent are zero."""
    shape = (count, X.shape[1], weights[1].shape[1])
    start: Any = tuple(X.new_zeros(shape) if state is None else state.contiguous() for state in states)
    # cuDNN keeps what its backward pass needs only in training mode; without dropout the mode changes no value.
    results = function(
        X, start if len(start) > 1 else start[0], weights, has_bias, 1, 0.0, torch.is_grad_enabled(), count > 1, False
    )
    return results[0].reshape(*X.shape[:2], count, -1).transpose(1, 2), *results[1:]


def _stored(W: Any, R: Any, B: Any, order: Sequence[int], count: int) -> list[fx.Node] | None:
    """The stored tensors that torch's weights are, one after the other; None where one is put together of several.

    Every element gets a number, and the numbers go the way of the elements.
    """
    leaves: list[fx.Node] = []
    numbered: dict[fx.Node, Tensor] = {}
    found = [None if one is None else _numbers(one, leaves, numbered) for one in (W, R, B)]
    if found[0] is None or found[1] is None or (B is not None and found[2] is None):
        return None
    firsts = {int(numbered[leaf].reshape(-1)[0]): leaf for leaf in leaves}
    stored = []
    for numbers in recurrent.flat_weights(found[0], found[1], found[2], order, range(count)):
        leaf = firsts.get(int(numbers.reshape(-1)[0]))
        if leaf is None or not torch.equal(numbers, numbered[leaf]):
            return None
        stored.append(leaf)
    return stored


def _numbers(node: Any, leaves: list[fx.Node], numbered: dict[fx.Node, Tensor]) -> Tensor | None:
    """The numbers of the elements of a value that is moved from stored ones; None: it is more than that."""
    if not isinstance(node, fx.Node):
        return None
    if node in numbered:
        return numbered[node]
    if node.op == "placeholder":
        fact = fact_about(node)
        if fact is None or not 0 < math.prod(fact.shape) <= _LARGEST:
            return None
        begin = sum(numbered[leaf].numel() for leaf in leaves)
        numbered[node] = torch.arange(begin, begin + math.prod(fact.shape)).reshape(fact.shape)
        leaves.append(node)
        return numbered[node]
    sources = {source: _numbers(source, leaves, numbered) for source in node.all_input_nodes}
    if node.target not in _MOVES or any(source is None for source in sources.values()):
        return None
    arguments, keywords = fx.node.map_arg((node.args, node.kwargs), lambda source: sources[source])
    numbered[node] = node.target(*arguments, **keywords)
    return numbered[node]


_FUSED: dict[Any, tuple[Any, tuple[int, ...]]] = {
    recurrent.lstm: (_lstm, recurrent.LSTM_GATES),
    recurrent.gru: (_gru, recurrent.GRU_GATES),
    recurrent.rnn: (_rnn, (0,)),
}
