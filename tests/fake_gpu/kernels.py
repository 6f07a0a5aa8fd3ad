"""Operators that torch has for GPUs alone, by their formula: a CPU computes what a GPU would be asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _softmax_in_float32(x: Tensor, axis: int, half_to_float: bool) -> Tensor:
    return aten._softmax(x.float() if half_to_float else x, axis, False)


def _log_softmax_in_float32(x: Tensor, axis: int, half_to_float: bool) -> Tensor:
    return aten._log_softmax(x.float() if half_to_float else x, axis, False)


def _scaled_product(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """A GPU's FP8 matmul, with what a GPU demands of them; CPUs would round to 16 bits on the way."""
    assert left.stride(1) == 1, "row by row"
    assert right.stride(0) == 1, "column by column"
    assert not any(size % 16 for size in right.shape)
    assert torch.float8_e4m3fn in (left.dtype, right.dtype), "two of e5m2 are not multiplied"
    assert bias is None
    assert result_scale is None
    return ((left.float() * left_scale) @ (right.float() * right_scale)).to(out_dtype)


def _lstm_cell(
    from_input: Tensor, from_hidden: Tensor, cell: Tensor, input_bias: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = from_input + from_hidden
    for term in (input_bias, bias):
        gates = gates if term is None else gates + term
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat((i, f, g, o), 1)


def _lstm_cell_backward(
    of_hidden: Tensor | None, of_cell: Tensor | None, cell: Tensor, new: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = gates.chunk(4, 1)
    hidden = torch.zeros_like(new) if of_hidden is None else of_hidden
    through = hidden * o * (1 - new.tanh() ** 2) + (0 if of_cell is None else of_cell)
    parts = (
        through * g * i * (1 - i),
        through * cell * f * (1 - f),
        through * i * (1 - g**2),
        hidden * new.tanh() * o * (1 - o),
    )
    of_gates = torch.cat(parts, 1)
    return of_gates, through * f, of_gates.sum(0) if has_bias else None


def _gru_cell(
    from_input: Tensor, from_hidden: Tensor, state: Tensor, input_bias: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    inputs = from_input if input_bias is None else from_input + input_bias
    hiddens = from_hidden if bias is None else from_hidden + bias
    (ir, iz, i_n), (hr, hz, hn) = inputs.chunk(3, 1), hiddens.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i_n + r * hn).tanh()
    return n + z * (state - n), torch.cat((r, z, n, state, hn), 1)


def _gru_cell_backward(of_state: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    r, z, n, state, hn = workspace.chunk(5, 1)
    of_n = of_state * (1 - z) * (1 - n**2)
    of_z = of_state * (state - n) * z * (1 - z)
    of_r = of_n * hn * r * (1 - r)
    of_input, of_hidden = torch.cat((of_r, of_z, of_n), 1), torch.cat((of_r, of_z, of_n * r), 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, of_state * z, *biases


INSTEAD: dict[Any, Callable[..., Any]] = {
    aten._scaled_mm.default: _scaled_product,
    aten._softmax.default: _softmax_in_float32,
    aten._log_softmax.default: _log_softmax_in_float32,
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
"""Operator -> what computes the same on a CPU."""
