"""Loops in a traced training graph: one step and one backward step (torch's scan), which the exporter writes as Scan.

Their number of steps may be open. Where nothing is traced, a loop in Python over the steps is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.utils import first_slice_copy, materialize_as_graph
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onward.lowering.passes import is_traced, only_first_derivative

LARGEST_UNROLLED_STEPS = 3
"""More take longer to trace and to write than a scan of them."""

Tensors = tuple[Tensor, ...]
ScanStep = Callable[[Tensors, Tensors, tuple[Any, ...]], tuple[Tensors, Tensors]]
"""(states, this step's slices, what all steps read) -> (next states, this step's outputs)."""


def is_scanned(steps: Any) -> bool:
    """Whether so many steps become a scan: in a trace, where they are a symbol, or more than a few."""
    if torch.compiler.is_compiling():
        return False
    return isinstance(steps, torch.SymInt) or (
        isinstance(steps, int) and steps > LARGEST_UNROLLED_STEPS and is_traced()
    )


def results_apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, computed beside the trace: its shapes and types count."""
    with disable_proxy_modes_tracing(), torch.no_grad():
        return function(*arguments)


def have_same_shapes(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all are tensors, of the same shapes and types, as what a scan carries must be."""
    return all(
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and one.dtype is other.dtype
        and one.dim() == other.dim()
        and all(statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=True))
        for one, other in zip(some, others, strict=True)
    )


def scan_steps(step: ScanStep, states: Tensors, slices: Tensors, shared: tuple[Any, ...]) -> tuple[Tensors, Tensors]:
    """Runs a step for each position of the first axis of `slices`.

    Args:
        step: reads tensors from its arguments alone; what it closes over has no gradient.
        states: before the first step.
        slices: with the same size of the first axis.
        shared: tensors, sizes and others that every step reads.

    Returns:
        The states after the last step, and the outputs of all steps, stacked along a first axis.
    """
    passed = [place for place, value in enumerate(shared) if isinstance(value, Tensor | torch.SymInt)]

    def reading(states: Tensors, now: Tensors, given: tuple[Any, ...]) -> tuple[Tensors, Tensors]:
        read = list(shared)
        for place, value in zip(passed, given, strict=True):
            read[place] = value
        return step(states, now, tuple(read))

    # Several views of one tensor may not enter, such as zeros from which two states begin.
    read = (*states, *slices, *(shared[place] for place in passed))
    operands = (value.clone() if isinstance(value, Tensor) else value for value in read)
    results = _Scan.apply(reading, len(states), len(slices), *operands)  # type: ignore[no-untyped-call]
    return results[: len(states)], results[len(states) :]


class _Scan(torch.autograd.Function):
    """Keeps the states before each step; the backward pass computes each step again, from the last to the first."""

    @staticmethod
    def forward(ctx: Any, step: ScanStep, states: int, slices: int, *operands: Any) -> Tensors:
        def forward(*arguments: Any) -> Tensors:
            before, now, shared = _split(arguments, states, slices)
            following, outputs = step(before, now, shared)
            # No result may be an input, or another result.
            return tuple(value.clone() for value in (*following, *before, *outputs))

        first, scanned, shared = _split(operands, states, slices)
        with torch._C._AutoDispatchBelowAutograd():
            results = scan_op(forward, list(first), list(scanned), shared)
        finals, kept, outputs = _split(results, states, states)
        ctx.step, ctx.slices, ctx.places = step, slices, states
        ctx.operands = (tuple(kept), scanned, shared)
        ctx.mark_non_differentiable(*(value for value in (*finals, *outputs) if not value.is_floating_point()))
        return (*finals, *outputs)

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        kept, scanned, shared = ctx.operands
        reached = ctx.needs_input_grad[3 + ctx.places :]
        differentiated = [value.is_floating_point() for value in kept]
        differentiated += [a and b.is_floating_point() for a, b in zip(reached, scanned, strict=False)]
        differentiated += [*reached[len(scanned) :]]
        counts = (ctx.places, len(scanned))
        of_finals, of_outputs = gradients[: ctx.places], gradients[ctx.places :]
        carried = [g for g, value in zip(of_finals, kept, strict=True) if value.is_floating_point()]
        sums = [torch.zeros_like(v) for v, wanted in zip(shared, reached[len(scanned) :], strict=True) if wanted]
        wanted_outputs = [g for g in of_outputs if g.is_floating_point()]

        def back(*arguments: Any) -> Tensors:
            states, added, rest = _split(arguments, len(carried), len(sums))
            (*before_and_now,), of_step, read = _split(rest, sum(counts), len(wanted_outputs))
            leaves = [
                value.detach().requires_grad_() if wanted else value
                for value, wanted in zip((*before_and_now, *read), differentiated, strict=True)
            ]
            with torch.enable_grad():
                following, outputs = ctx.step(*_split(tuple(leaves), *counts))
            found = _gradients(
                (*following, *outputs),
                [v for v, w in zip(leaves, differentiated, strict=True) if w],
                (*states, *of_step),
            )
            of_states, of_slices, of_shared = _split(found, len(carried), len(found) - len(carried) - len(sums))
            more = (total + one for total, one in zip(added, of_shared, strict=True))
            return tuple(value.clone() for value in (*of_states, *more, *of_slices))

        reversed_ = [value.flip(0) for value in (*kept, *scanned, *wanted_outputs)]
        start = (*carried, *sums)
        graph = materialize_as_graph(back, (*start, *map(first_slice_copy, reversed_), *shared))
        results = scan_op(graph, list(start), reversed_, shared)
        of_states, of_shared, of_slices = (iter(part) for part in _split(results, len(carried), len(sums)))
        found = [next(of_states) if one else None for one in differentiated[: ctx.places]]
        found += [next(of_slices).flip(0) if one else None for one in differentiated[ctx.places : sum(counts)]]
        found += [next(of_shared) if one else None for one in differentiated[sum(counts) :]]
        return (None, None, None, *found)


def _split(values: Sequence[Any], first: int, second: int) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    return tuple(values[:first]), tuple(values[first : first + second]), tuple(values[first + second :])


def _gradients(results: Sequence[Tensor], leaves: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Of the floats among the results; zeros for a leaf that none depends on."""
    floats = [value for value in results if value.is_floating_point()]
    pairs = [(value, one) for value, one in zip(floats, given, strict=True) if value.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if pairs:
        values, ones = zip(*pairs, strict=True)
        found = torch.autograd.grad(values, leaves, ones, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]
