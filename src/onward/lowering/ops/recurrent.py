"""RNN, GRU and LSTM: torch's fused kernels where the configuration is theirs, otherwise a loop over time.

Legend: T steps of time, N batch, I input size, H hidden size, D directions, G gates. Inside, X is (T, N, I),
a state (D, N, H) and Y (T, D, N, H), which is ONNX's layout 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.cell_activations import Activation, name_activations, resolve_activations
from onward.lowering.kernels.dtypes import wide_on_cpus, wide_type
from onward.lowering.kernels.scanning import is_scanned, scan_steps
from onward.lowering.registry import lowers, takes_attributes_of

States = tuple[Tensor, ...]
Read = tuple[Any, ...]
Step = Callable[[Tensor, States, Read], States]
"""(one step's projected inputs (N, G*H), states, what all steps read) -> next states."""
Cell = Callable[[int], tuple[Callable[[Tensor], Tensor], Step, Read]]
"""direction -> (projection of all inputs at once, one step, what all steps read: weights)."""
Kernel = Callable[[Tensor, Sequence[int], States], tuple[Tensor, States]]
"""(X, directions, states) -> (Y (T, N, D*H), states): a fused call of torch."""

GRU_GATES, LSTM_GATES = (1, 0, 2), (0, 2, 3, 1)
"""Where torch's gates are in ONNX's order."""

_REVERSED = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True), "foward": (False,)}
"""Per direction, whether time runs backwards; "foward" is the default that GRU-1's schema spells so."""


def _directions(direction: str, W: Tensor, R: Tensor, gates: int, hidden_size: int | None) -> int:
    if direction not in _REVERSED:
        raise ValueError(f"direction is {direction!r}; expected forward, reverse or bidirectional.")
    count = len(_REVERSED[direction])
    hidden = R.shape[-1]
    if W.shape[:2] != (count, gates * hidden) or R.shape != (count, gates * hidden, hidden):
        raise ValueError(
            f"W has shape {list(W.shape)} and R {list(R.shape)}; direction={direction!r} with hidden size {hidden} "
            f"needs [{count}, {gates * hidden}, input size] and [{count}, {gates * hidden}, {hidden}]."
        )
    if hidden_size is not None and hidden_size != hidden:
        raise ValueError(f"hidden_size is {hidden_size}, but R of shape {list(R.shape)} has hidden size {hidden}.")
    return count


def _start(X: Tensor, R: Tensor, layout: int, *states: Tensor | None) -> tuple[Tensor, States]:
    """X as (T, N, I) and the initial states as (D, N, H), zeros where absent."""
    if layout:
        X = X.transpose(0, 1)
        states = tuple(None if s is None else s.transpose(0, 1) for s in states)
    shape = (R.shape[0], X.shape[1], R.shape[-1])
    return X, tuple(torch.zeros(shape, dtype=X.dtype, device=X.device) if s is None else s for s in states)


def _finish(Y: Tensor, states: States, layout: int) -> tuple[Tensor, ...]:
    """Layout 1 wants Y as (N, T, D, H) and states as (N, D, H)."""
    if layout:
        return Y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in states)
    return Y, *states


def _reverse(X: Tensor, lengths: Tensor | None) -> Tensor:
    """Time backwards, each sequence within its own length; X is (T, N, ...)."""
    if lengths is None:
        return X.flip(0)
    time = torch.arange(X.shape[0], device=X.device)[:, None]
    places = torch.where(time < lengths, lengths - 1 - time, time)
    return X.gather(0, places[..., None].expand(X.shape))


def _recur(
    X: Tensor, states: States, lengths: Tensor | None, direction: str, kernel: Kernel | None, cell: Cell
) -> tuple[Tensor, States]:
    """Runs all directions; `kernel` is None where torch has no fused call for the configuration."""
    reversed_ = _REVERSED[direction]
    if lengths is not None:
        lengths = lengths.to(torch.int64)
    if is_scanned(X.shape[0]):
        kernel = None
    if kernel is not None and lengths is None and reversed_ != (True,):
        Y, states = kernel(X, range(len(reversed_)), states)
        return Y.reshape(*Y.shape[:2], len(reversed_), -1).transpose(1, 2), states
    outputs, finals = [], []
    for d, backwards in enumerate(reversed_):
        x = _reverse(X, lengths) if backwards else X
        start = tuple(s[d] for s in states)
        if kernel is None:
            y, final = _loop(x, start, lengths, *cell(d))
        else:
            y, last = kernel(x, [d], tuple(s[None] for s in start))
            final = tuple(s[0] for s in last)
            if lengths is not None:
                y, final = _cut(y, start[0], lengths)
        outputs.append(_reverse(y, lengths) if backwards else y)
        finals.append(final)
    return torch.stack(outputs, dim=1), tuple(torch.stack(parts) for parts in zip(*finals, strict=True))


def _loop(
    X: Tensor, states: States, lengths: Tensor | None, project: Callable[[Tensor], Tensor], step: Step, read: Read
) -> tuple[Tensor, States]:
    """One direction, step by step; a sequence that has ended keeps its states and gives zeros.

    16 bits become float32: what every step adds to a weight's gradient would be rounded as often as there are steps.
    """
    dtype, wide = X.dtype, wide_type(X.dtype)
    projected, states = project(X).to(wide), tuple(state.to(wide) for state in states)
    read = tuple(None if tensor is None else tensor.to(wide) for tensor in read)
    if is_scanned(X.shape[0]):
        Y, states = _scan(projected, states, lengths, step, read)
    else:
        outputs = []
        for time, x in enumerate(projected.unbind(0)):
            output, states = _step_while_alive(x, states, time, lengths, step, read)
            outputs.append(output)
        Y = torch.stack(outputs)
    return Y.to(dtype), tuple(state.to(dtype) for state in states)


def _scan(X: Tensor, states: States, lengths: Tensor | None, step: Step, read: Read) -> tuple[Tensor, States]:
    """`_loop` as a scan of steps."""
    times = torch.arange(X.shape[0], device=X.device)
    masks = () if lengths is None else (lengths,)

    def one(states: States, now: States, read: Read) -> tuple[States, States]:
        ends = read[0] if masks else None
        output, following = _step_while_alive(now[0], states, now[1], ends, step, read[len(masks) :])
        return following, (output,)

    finals, (outputs,) = scan_steps(one, states, (X, times), (*masks, *read))
    return outputs, finals


def _step_while_alive(
    x: Tensor, states: States, time: int | Tensor, lengths: Tensor | None, step: Step, read: Read
) -> tuple[Tensor, States]:
    following = step(x, states, read)
    if lengths is None:
        return following[0], following
    alive = (time < lengths)[:, None]
    following = tuple(torch.where(alive, new, old) for new, old in zip(following, states, strict=True))
    return torch.where(alive, following[0], 0), following


def _cut(Y: Tensor, start: Tensor, lengths: Tensor) -> tuple[Tensor, States]:
    """A fused result over all T steps, cut to each sequence's length: outputs and the last hidden state."""
    time = torch.arange(Y.shape[0], device=Y.device)[:, None, None]
    last = (lengths - 1).clamp(min=0)[None, :, None].expand(1, *Y.shape[1:])
    hidden = torch.where(lengths[:, None] > 0, Y.gather(0, last)[0], start)
    return torch.where(time < lengths[:, None], Y, 0), (hidden,)


def _reorder(parameter: Tensor, order: Sequence[int]) -> Tensor:
    """Gates (the first axis, in equal parts) in torch's order."""
    parts = parameter.chunk(len(order))
    return torch.cat([parts[gate] for gate in order])


def flat_weights(
    W: Tensor, R: Tensor, B: Tensor | None, order: Sequence[int], directions: Sequence[int]
) -> list[Tensor]:
    """The parameters as torch's fused calls take them: per direction W, R and the two biases."""
    weights = []
    for d in directions:
        weights += [_reorder(W[d], order), _reorder(R[d], order)]
        if B is not None:
            weights += [_reorder(bias, order) for bias in B[d].chunk(2)]
    return weights


def _call_fused(
    function: Any,
    W: Tensor,
    R: Tensor,
    B: Tensor | None,
    order: Sequence[int],
    X: Tensor,
    directions: Sequence[int],
    states: States,
) -> tuple[Tensor, States]:
    # torch's loop on a CPU adds gradients of weights in their type at every step; its LSTM there is a single kernel.
    dtype = X.dtype if function is torch.lstm else wide_on_cpus(X)
    weights = [weight.to(dtype) for weight in flat_weights(W, R, B, order, directions)]
    started = tuple(state.to(dtype).contiguous() for state in states)
    start: Any = started if len(states) > 1 else started[0]
    # cuDNN keeps what its backward pass needs only in training mode; without dropout the mode changes no value.
    is_trained, is_bidirectional = torch.is_grad_enabled(), len(directions) > 1
    results = function(X.to(dtype), start, weights, B is not None, 1, 0.0, is_trained, is_bidirectional, False)
    Y, *finals = (result.to(X.dtype) for result in results)
    return Y, tuple(finals)


@lowers("RNN", since=1)
def rnn(
    X: Tensor,
    W: Tensor,
    R: Tensor,
    B: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: tuple[float, ...] | None = None,
    activation_beta: tuple[float, ...] | None = None,
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    output_sequence: int = 0,
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__RNN.html; W (D, H, I), R (D, H, H), B (D, 2*H); outputs Y, Y_h."""
    count = _directions(direction, W, R, 1, hidden_size)
    # The schema's default names two functions; one direction uses the first.
    given = activations[:count] if activations == ("Tanh", "Tanh") else activations
    names = name_activations(given, ["tanh"], count)
    functions = resolve_activations(names, activation_alpha, activation_beta, [clip] * len(names))
    X, states = _start(X, R, layout, initial_h)

    def cell(d: int) -> tuple[Callable[[Tensor], Tensor], Step, Read]:
        bias = None if B is None else B[d].reshape(2, -1).sum(0)

        def step(x: Tensor, states: States, read: Read) -> States:
            return (functions[d](x + F.linear(states[0], *read)),)

        return partial(F.linear, weight=W[d], bias=bias), step, (R[d],)

    kernel: Kernel | None = None
    if clip is None and len(set(names)) == 1 and names[0] in ("tanh", "relu"):
        function = torch.rnn_tanh if names[0] == "tanh" else torch.rnn_relu
        kernel = partial(_call_fused, function, W, R, B, (0,))
    Y, states = _recur(X, states, sequence_lens, direction, kernel, cell)
    return _finish(Y, states, layout)


@lowers("GRU", since=1)
def gru(
    X: Tensor,
    W: Tensor,
    R: Tensor,
    B: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: tuple[float, ...] | None = None,
    activation_beta: tuple[float, ...] | None = None,
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
    output_sequence: int = 0,
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__GRU.html; gates z, r, h; W (D, 3*H, I), R (D, 3*H, H), B (D, 6*H).

    Outputs Y, Y_h. torch's kernel resets after the linear layer, as `linear_before_reset=1` says.
    """
    count = _directions(direction, W, R, 3, hidden_size)
    names = name_activations(activations, ["sigmoid", "tanh"], count)
    functions = resolve_activations(names, activation_alpha, activation_beta, [clip] * len(names))
    X, states = _start(X, R, layout, initial_h)

    def cell(d: int) -> tuple[Callable[[Tensor], Tensor], Step, Read]:
        f, g = functions[2 * d : 2 * d + 2]
        hidden = R.shape[-1]
        of_gates, of_candidate = torch.split(R[d], [2 * hidden, hidden])
        bias_x, bias_h = (None, None) if B is None else B[d].chunk(2)
        bias_candidate = None if bias_h is None else bias_h[2 * hidden :]
        bias_gates = None if bias_h is None else bias_h[: 2 * hidden]

        def step(x: Tensor, states: States, read: Read) -> States:
            (h,) = states
            of_gates, of_candidate, bias_gates, bias_candidate = read
            for_gates, for_candidate = torch.split(x, [2 * hidden, hidden], dim=-1)
            z, r = f(for_gates + F.linear(h, of_gates, bias_gates)).chunk(2, dim=-1)
            if linear_before_reset:
                candidate = g(for_candidate + r * F.linear(h, of_candidate, bias_candidate))
            else:
                candidate = g(for_candidate + F.linear(r * h, of_candidate, bias_candidate))
            return ((1 - z) * candidate + z * h,)

        read = (of_gates, of_candidate, bias_gates, bias_candidate)
        return partial(F.linear, weight=W[d], bias=bias_x), step, read

    kernel: Kernel | None = None
    if clip is None and linear_before_reset and names == ["sigmoid", "tanh"] * count:
        kernel = partial(_call_fused, torch.gru, W, R, B, GRU_GATES)
    Y, states = _recur(X, states, sequence_lens, direction, kernel, cell)
    return _finish(Y, states, layout)


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x (.., I), weight (G*H, I), bias (G*H) or None) -> (.., G*H), as `F.linear`."""


def recur_lstm(
    X: Tensor,
    W: Tensor,
    R: Tensor,
    B: Tensor | None,
    sequence_lens: Tensor | None,
    initial: Sequence[Tensor | None],
    P: Tensor | None,
    product: Product,
    *,
    activation_alpha: tuple[float, ...] | None = None,
    activation_beta: tuple[float, ...] | None = None,
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    output_count: int,
) -> tuple[Tensor, ...]:
    """`lstm` whose products with W and R are `product`'s; torch's fused call takes its place for `F.linear`."""
    count = _directions(direction, W, R, 4, hidden_size)
    names = name_activations(activations, ["sigmoid", "tanh", "tanh"], count)
    clips = (clip, clip, None) * count
    functions = resolve_activations(names, activation_alpha, activation_beta, clips)
    X, states = _start(X, R, layout, *initial)

    def cell(d: int) -> tuple[Callable[[Tensor], Tensor], Step, Read]:
        bias = None if B is None else B[d].reshape(2, -1).sum(0)
        step = partial(
            _lstm_step,
            product=product,
            functions=functions[3 * d : 3 * d + 3],
            input_forget=bool(input_forget),
        )
        return lambda x: product(x, W[d], bias), step, (R[d], *(() if P is None else P[d].chunk(3)))

    kernel: Kernel | None = None
    plain = clip is None and P is None and not input_forget and names == ["sigmoid", "tanh", "tanh"] * count
    # The fused call tells the last cell state only, not the one at each sequence's end.
    if product is F.linear and plain and (sequence_lens is None or output_count < 3):
        kernel = partial(_call_fused, torch.lstm, W, R, B, LSTM_GATES)
    Y, states = _recur(X, states, sequence_lens, direction, kernel, cell)
    return _finish(Y, states, layout)


@lowers("LSTM", since=1)
@takes_attributes_of(recur_lstm)
def lstm(
    X: Tensor,
    W: Tensor,
    R: Tensor,
    B: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    P: Tensor | None = None,
    *,
    output_sequence: int = 0,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__LSTM.html; gates i, o, f, c; W (D, 4*H, I), R (D, 4*H, H), B (D, 8*H).

    Peepholes P (D, 3*H) are those of i, o, f. Outputs Y, Y_h, Y_c. `input_forget` takes 1 - i as the forget gate.
    `clip` bounds what goes into the gates, but not the cell on its way out, as onnxruntime does.
    """
    return recur_lstm(X, W, R, B, sequence_lens, (initial_h, initial_c), P, F.linear, **attributes)


def _lstm_step(
    x: Tensor,
    states: States,
    read: Read,
    product: Product,
    functions: Sequence[Activation],
    input_forget: bool,
) -> States:
    """Reads R and, where there are any, the three peepholes."""
    h, c = states
    f, g, output = functions
    R, *peepholes = read
    i_in, o_in, f_in, c_in = (x + product(h, R, None)).chunk(4, dim=-1)
    if peepholes:
        i_in, f_in = i_in + peepholes[0] * c, f_in + peepholes[2] * c
    i = f(i_in)
    forget = 1 - i if input_forget else f(f_in)
    c = forget * c + i * g(c_in)
    if peepholes:
        o_in = o_in + peepholes[1] * c
    return f(o_in) * output(c), c
