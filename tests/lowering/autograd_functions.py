"""One example of each `torch.autograd.Function` of onward that needs no other rank, and the same in torch's operators.

`tests/lowering/test_autograd_functions.py` puts every example through the same questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels import average_pooling, convolution_gradients, max_pooling
from onward.lowering.kernels.attention import attend
from onward.lowering.kernels.bounds import clamp
from onward.lowering.kernels.embeddings import sum_bags
from onward.lowering.kernels.joint_casts import cast_together
from onward.lowering.kernels.short_rows import log_softmax, softmax
from onward.lowering.kernels.thin_products import multiply_thin
from onward.lowering.ops import fused
from onward.lowering.ops.fused_cross_entropy import linear_cross_entropy
from onward.lowering.ops.fused_experts import places_in, sorted_rows, weighed_sum
from onward.lowering.passes import is_plain
from onward.lowering.rewriting.linear_layers import Recipe, linear_layers
from onward.lowering.rewriting.sparse_lookups import lookup, split_table
from onward.parallel.pipeline import stage

Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Example:
    """How a function is called, and what it stands for.

    Attributes:
        call: onward's function of tensors that may have gradients.
        plain: the same in torch's operators.
        shapes: of these tensors.
        second: whether it has second derivatives; else they are refused in words.
        rows: those of the tensors whose first axis may have size 0, all at once; none, if the example has one size.
    """

    call: Call
    plain: Call
    shapes: Sequence[tuple[int, ...]]
    second: bool
    rows: tuple[int, ...] = ()


IDS = torch.tensor([[1, 3, -4], [3, 3, 0]])
BAGS, BOUNDS = IDS % 6, torch.tensor([0, 2, 2, 6])
LABELS = torch.tensor([2, 0, 5, 2])
COSINE, SINE = torch.rand(3, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
ORDER = torch.tensor([3, 0, 5])
"""Of the choices of three tokens, two each, those that are taken."""


def _alike(call: Any, **options: Any) -> Call:
    return lambda x: call(x, COSINE.to(x.dtype), SINE.to(x.dtype), **options)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool = False) -> Tensor:
    if interleaved:
        turned = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
    else:
        turned = torch.cat([-x[..., 2:], x[..., :2]], -1)
    return x * cosine + turned * sine


def _joined(recipe: Callable[[], Recipe] | None) -> Call:
    """Two layers of one input, which is kept, or is made again of what it was made of."""

    def call(x: Tensor, W: Tensor, V: Tensor, B: Tensor) -> Tensor:
        made = None if recipe is None else recipe()
        X = x if made is None else x.tanh()
        found = linear_layers(X, (("matmul", False), ("linear", True)), (W, V), (None, B), made, (x,))
        return torch.cat(found, -1)

    return call


def _two_layers(x: Tensor, W: Tensor, V: Tensor, B: Tensor) -> Tensor:
    return torch.cat([x @ W, F.linear(x, V, B)], -1)


def _losses(call: Any, **options: Any) -> Call:
    return lambda rows, matrix, bias: call(rows, matrix, LABELS[: len(rows)], bias=bias, **options)


def _cross_entropy(rows: Tensor, matrix: Tensor, labels: Tensor, bias: Tensor, **options: Any) -> Tensor:
    logits = F.linear(rows, matrix, bias)
    low = logits.dtype not in (torch.float32, torch.float64)
    return F.cross_entropy(logits.float() if low else logits, labels, **options)


def _sorted(tokens: Tensor) -> Tensor:
    return sorted_rows(tokens, ORDER, places_in(ORDER, 6), 2)


def _weighed(outputs: Tensor, shares: Tensor) -> Tensor:
    return weighed_sum(outputs, shares, ORDER, places_in(ORDER, 6))


def _scattered(outputs: Tensor, shares: Tensor) -> Tensor:
    rows = outputs.new_zeros(6, 4).index_copy(0, ORDER, outputs).view(3, 2, 4)
    return (rows * shares.unsqueeze(-1)).sum(-2)


def _convolved(turns: bool, swaps: bool) -> Call:
    along = ((1, 1), (1, 2), (1, 1), 1 if turns else 3)

    def call(x: Tensor, W: Tensor, B: Tensor) -> Tensor:
        if not is_plain(x) or torch.is_autocast_enabled("cpu"):
            return F.conv2d(x, W, B, *along)
        found: Tensor = convolution_gradients._Convolution.apply(x, W, B, along, turns, swaps, False)
        return found

    return call


def _arrived(x: Tensor) -> Tensor:
    return stage._arrive(x * 2)


def _departed(x: Tensor, y: Tensor) -> Tensor:
    return stage._depart(x * 2, True, y) + 0 * y.sum()


def _both_parts(table: Tensor) -> Tensor:
    first, second = split_table(table)
    return lookup(first, IDS).sum(1).flatten() @ second[:4].reshape(-1)[:8] + second.square().sum()


def _both_reads(table: Tensor) -> Tensor:
    return table[IDS].sum(1).flatten() @ table[:4].reshape(-1)[:8] + table.square().sum()


def _sums(table: Tensor) -> Tensor:
    return table[BAGS].sum(1)


def _means(table: Tensor) -> Tensor:
    bags = BAGS.flatten().tensor_split(BOUNDS[1:-1].tolist())
    return torch.stack([table[bag].sum(0) / max(1, len(bag)) for bag in bags])


WINDOWS = ((3, 3), (2, 2), (1, 1), (1, 1))
EXAMPLES: Mapping[str, tuple[str, Example]] = {
    "bounds": ("kernels.bounds._Clamp", Example(
        lambda x: clamp(x, -0.5, 0.6), lambda x: torch.clamp(x, -0.5, 0.6), [(6, 5)], second=True, rows=(0,))),
    "softmax of short rows": ("kernels.short_rows._Softmax", Example(
        lambda x: softmax(x, -1), lambda x: torch.softmax(x, -1), [(6, 5)], second=True, rows=(0,))),
    "casts of several weights": ("kernels.joint_casts._JointCast", Example(
        lambda x, y: torch.outer(*cast_together((x, y), torch.complex128)).real, torch.outer, [(3,), (4,)],
        second=True)),
    "log-softmax of short rows": ("kernels.short_rows._LogSoftmax", Example(
        lambda x: log_softmax(x, -1), lambda x: torch.log_softmax(x, -1), [(6, 5)], second=True, rows=(0,))),
    "outer products": ("kernels.thin_products._Thin", Example(
        lambda a, b: _or(multiply_thin(a, b), a, b), torch.matmul, [(4, 3, 1), (4, 1, 2)], second=True, rows=(0, 1))),
    "matrices and vectors": ("kernels.thin_products._Thin", Example(
        lambda a, b: _or(multiply_thin(a, b), a, b), torch.matmul, [(4, 3, 2), (4, 2, 1)], second=True, rows=(0, 1))),
    "learned bias of attention": ("kernels.attention._Attention", Example(
        lambda q, k, v, m: attend(q, k, v, m, scale=0.3),
        lambda q, k, v, m: torch.softmax(q @ k.mT * 0.3 + m, -1) @ v,
        [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 2), (3, 1, 7)], second=True, rows=(0, 1, 2))),
    "maxima of windows": ("kernels.max_pooling._MaxPool", Example(
        lambda x: max_pooling.pool_max(x, WINDOWS, False), lambda x: F.max_pool2d(x, *WINDOWS),
        [(2, 2, 5, 6)], second=True, rows=(0,))),
    "sums of bags": ("kernels.embeddings._Bags", Example(
        lambda x: sum_bags(x, BAGS, None, "sum") if is_plain(x) else _sums(x), _sums, [(6, 5)], second=True)),
    "means of bags of several sizes": ("kernels.embeddings._Bags", Example(
        lambda x: sum_bags(x, BAGS.flatten(), BOUNDS, "mean") if is_plain(x) else _means(x), _means,
        [(6, 5)], second=True)),
    "means of windows": ("kernels.average_pooling._AveragePool", Example(
        lambda x: average_pooling.pool_average(x, *WINDOWS[:3], True, False),
        lambda x: F.avg_pool2d(x, *WINDOWS[:3], True, False), [(2, 2, 5, 6)], second=True, rows=(0,))),
    "RMS norm": ("ops.fused._RMSNorm", Example(
        lambda x, s: fused.rms_norm(x, (4,), s, 1e-5), lambda x, s: F.rms_norm(x, (4,), s, 1e-5),
        [(2, 3, 4), (4,)], second=False, rows=(0,))),
    "RMS norm over two axes": ("ops.fused._RMSNorm", Example(
        lambda x, s: fused.rms_norm(x, (3, 4), s, 1e-5), lambda x, s: F.rms_norm(x, (3, 4), s, 1e-5),
        [(2, 3, 4), (3, 4)], second=False, rows=(0,))),
    "SwiGLU": ("ops.fused._SwiGLU", Example(
        fused.swiglu, lambda a, b: F.silu(a) * b, [(2, 3, 4), (2, 3, 4)], second=False, rows=(0, 1))),
    "SwiGLU of one value for all": ("ops.fused._SwiGLU", Example(
        fused.swiglu, lambda a, b: F.silu(a) * b, [(2, 3, 4), (3, 1)], second=False, rows=(0,))),
    "rotation of halves": ("ops.fused._Rotary", Example(
        _alike(fused.rotary_embedding), _alike(_rotated), [(2, 3, 4)], second=False, rows=(0,))),
    "rotation of neighbors": ("ops.fused._Rotary", Example(
        _alike(fused.rotary_embedding, interleaved=1), _alike(_rotated, interleaved=True),
        [(2, 3, 4)], second=False, rows=(0,))),
    "mean cross entropy of a layer": ("ops.fused_cross_entropy._Chunked", Example(
        _losses(linear_cross_entropy), _losses(_cross_entropy), [(4, 3), (6, 3), (6,)], second=False)),
    "sum of cross entropies, one label ignored": ("ops.fused_cross_entropy._Chunked", Example(
        _losses(linear_cross_entropy, reduction="sum", ignore_index=2),
        _losses(_cross_entropy, reduction="sum", ignore_index=2), [(4, 3), (6, 3), (6,)], second=False, rows=(0,))),
    "rows in the order of experts": ("ops.fused_experts._SortedRows", Example(
        _sorted, lambda tokens: tokens[ORDER // 2], [(3, 4)], second=True)),
    "shares of experts": ("ops.fused_experts._WeighedSum", Example(
        _weighed, _scattered, [(3, 4), (3, 2)], second=True)),
    "images of few channels": ("kernels.convolution_gradients._Convolution", Example(
        _convolved(True, False), lambda x, W, B: F.conv2d(x, W, B, 1, (1, 2)),
        [(2, 2, 5, 4), (3, 2, 3, 3), (3,)], second=True, rows=(0,))),
    "channels by themselves": ("kernels.convolution_gradients._Convolution", Example(
        _convolved(False, True), lambda x, W, B: F.conv2d(x, W, B, 1, (1, 2), 1, 3),
        [(2, 3, 5, 4), (3, 1, 4, 3), (3,)], second=True, rows=(0,))),
    "joined layers": ("rewriting.linear_layers._Layers", Example(
        _joined(None), _two_layers, [(2, 3, 4), (4, 5), (2, 4), (2,)], second=False, rows=(0,))),
    "layers of what is made again": ("rewriting.linear_layers._Layers", Example(
        _joined(lambda: Recipe(torch.tanh)), lambda x, *layers: _two_layers(x.tanh(), *layers),
        [(2, 3, 4), (4, 5), (2, 4), (2,)], second=False, rows=(0,))),
    "lookups": ("rewriting.sparse_lookups._Lookup", Example(
        lambda table: lookup(split_table(table)[0], IDS), lambda table: table[IDS], [(8, 4)], second=False)),
    "a table read twice": ("rewriting.sparse_lookups._Split", Example(
        _both_parts, _both_reads, [(8, 4)], second=False)),
    "a value from another stage": ("parallel.pipeline.stage._Arrival", Example(
        _arrived, lambda x: x * 2, [(2, 3)], second=True, rows=(0,))),
    "a value for another stage": ("parallel.pipeline.stage._Departure", Example(
        _departed, lambda x, y: x * 2 + 0 * y.sum(), [(2, 3), (2,)], second=True, rows=(0,))),
}  # fmt: skip


def _or(found: Tensor | None, A: Tensor, B: Tensor) -> Tensor:
    return torch.matmul(A, B) if found is None else found


IN_OTHER_TESTS = {
    "kernels.dropout._Dropout": (
        "tests/lowering/kernels/test_dropout.py",
        ("test_the_gradient_is_dropped_alike", "test_what_is_kept_for_the_gradient_takes_a_byte"),
    ),
    "kernels.layer_norms._LayerNorm": (
        "tests/lowering/kernels/test_wide_gradients.py",
        ("test_second_derivatives_are_those_of_float64", "test_frozen_parameters_get_no_gradient"),
    ),
    "kernels.wide_gradients._Linear": (
        "tests/lowering/kernels/test_wide_gradients.py",
        ("test_second_derivatives_are_those_of_float64", "test_only_16_bits_that_are_differentiated_take_the_long_way"),
    ),
    "kernels.matmuls._Linear": (
        "tests/lowering/kernels/test_matmuls.py",
        ("test_values_and_gradients", "test_gradients_of_gradients", "test_functions_of_torch_func_get_torchs_own"),
    ),
    "kernels.scanning._Scan": (
        "tests/lowering/kernels/test_scanning.py",
        ("test_gradients_equal_those_of_torch_at_any_length", "test_second_derivatives_are_refused"),
    ),
    "rewriting.float8._Product": (
        "tests/lowering/rewriting/test_float8.py",
        ("test_values_and_gradients", "test_second_derivatives_are_refused"),
    ),
}
"""Functions of other types than float64, of random numbers, or of a trace: where their tests are, and which of
them they must have."""
