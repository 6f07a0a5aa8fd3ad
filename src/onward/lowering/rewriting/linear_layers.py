"""Linear layers that read the same input, as one function: what it keeps, and how their gradients add up.

The input is kept, or recomputed of what it was made of, once for all of them; its gradient is one sum in one place,
which tensor-parallel ranks exchange while each computes the gradients of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onward.lowering.building.tensor_facts import TensorFact
from onward.lowering.kernels.matmuls import add_product, gradient_of_weight, multiply
from onward.lowering.ops import fused
from onward.lowering.ops.linear import gemm, matmul
from onward.lowering.passes import is_plain, only_first_derivative
from onward.lowering.process_groups import begin_reduce_scatter, begin_sum

_unsafe_view = torch.ops.aten._unsafe_view.default

LEAST_BYTES = 2**18
"""Layers of smaller inputs are left to torch: all that they do takes less time than this takes to begin."""


Entry = tuple[Tensor, str, tuple[int, int] | None]
"""Where ranks begin to compute parts of layers: what each had before, the name of their group, and, where that was a
share of the tokens only, the axis of tokens and the number of shares. The ranks' gradients of it are added up."""


class Recipe:
    """How the input of some layers is made, in one pass; the first that asks makes it, for all of them.

    Args:
        code: makes the input out of its sources.
    """

    def __init__(self, code: Callable[..., Tensor]) -> None:
        # A module's `forward` by itself: nothing hooks onto it, and its call takes as long as what it computes.
        self._code = code.forward if isinstance(code, nn.Module) else code
        self.readers = 0
        self._waiting = 0
        self._made: Tensor | None = None

    def make(self, sources: Sequence[Any]) -> Tensor:
        """The input, which goes when as many have asked as there are readers."""
        if self._made is None:
            self._made, self._waiting = self._code(*sources), self.readers
        made = self._made
        self._waiting -= 1
        if not self._waiting:
            self._made = None
        return made


def linear_layers(
    X: Tensor,
    kinds: Sequence[tuple[str, bool]],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: Recipe | None,
    sources: Sequence[Any],
    entry: Entry | None = None,
) -> tuple[Tensor, ...]:
    """`X W + B` of X [..., K] for some weights W [K, N] and biases B [N], N of each its own.

    Args:
        X: what all of them read.
        kinds: for every layer, the name of the function that it stands for, which is called where there is nothing to
            save, and whether its W is [N, K].
        weights, biases: of the layers.
        recipe: makes X of the sources, which are kept in its place; None: X is kept.
        sources: tensors and other values; gradients flow through X.
        entry: of the region of tensor parallelism that begins with X, which nothing else reads.
    """
    if not _saves(X, kinds, weights, biases):
        layers = zip(kinds, weights, biases, strict=True)
        return tuple(_as_it_was(kind, is_transposed, X, W, B) for (kind, is_transposed), W, B in layers)
    return _applied(X, kinds, weights, biases, recipe, sources, entry)


def checked_layers(
    X: Tensor,
    kinds: Sequence[tuple[str, bool]],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: Recipe | None,
    sources: Sequence[Any],
    entry: Entry | None = None,
) -> tuple[Tensor, ...]:
    """`linear_layers` of shapes that have been found to save something, where all of the weights train."""
    is_usual = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    if is_usual and all(W.requires_grad for W in weights):
        return _applied(X, kinds, weights, biases, recipe, sources, entry)
    return linear_layers(X, kinds, weights, biases, recipe, sources, entry)


def _applied(
    X: Tensor,
    kinds: Sequence[tuple[str, bool]],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: Recipe | None,
    sources: Sequence[Any],
    entry: Entry | None,
) -> tuple[Tensor, ...]:
    if recipe is not None:
        recipe.readers += 1
        sources = [source.detach() if isinstance(source, Tensor) else source for source in sources]
    are_transposed = [is_transposed for _, is_transposed in kinds]
    before, *exchange = entry or (X, None, None)
    read = X if entry is None else X.detach()  # the gradient goes to what it was before
    result = _Layers.apply(before, read, exchange, recipe, sources, are_transposed, *weights, *biases)  # type: ignore[no-untyped-call]
    return result if len(kinds) > 1 else (result,)


def _saves(
    X: Tensor, kinds: Sequence[tuple[str, bool]], weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> bool:
    """Whether these are layers of which weights train, of an input that is worth it, and nothing traces them."""
    if X.numel() * X.element_size() < LEAST_BYTES or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if not (is_plain(X) and X.is_floating_point() and any(W.requires_grad for W in weights)):
        return False
    return have_shapes_of_layers(X, kinds, weights, biases)


def have_shapes_of_layers(
    X: Tensor | TensorFact,
    kinds: Sequence[tuple[str, bool]],
    weights: Sequence[Tensor | TensorFact],
    biases: Sequence[Tensor | TensorFact | None],
) -> bool:
    """Whether an input [..., K] goes with weights [K, N] and biases [N], as `linear_layers` takes them."""
    rank = len(X.shape)
    for (kind, is_transposed), W, B in zip(kinds, weights, biases, strict=True):
        if len(W.shape) != 2 or (rank != 2 if kind == "gemm" else rank < 2):
            return False
        outputs, inputs = W.shape if is_transposed else W.shape[::-1]
        if inputs != X.shape[-1] or not (B is None or B.shape == (outputs,)):
            return False
    return True


def _as_it_was(kind: str, is_transposed: bool, X: Tensor, W: Tensor, B: Tensor | None) -> Tensor:
    if kind == "matmul":
        return matmul(X, W.T if is_transposed else W)
    if kind == "gemm":
        return gemm(X, W, B, transB=int(is_transposed))
    return fused.linear(X, W, B, rows_are_outputs=int(is_transposed))


_BEFORE_WEIGHTS = 6
"""Arguments of `_Layers` that stand before the weights."""


class _Layers(torch.autograd.Function):
    """Products of X with weights, and sums with biases; the gradients are those of torch's `addmm`."""

    @staticmethod
    def forward(
        ctx: Any,
        before: Tensor,
        X: Tensor,
        exchange: tuple[str | None, tuple[int, int] | None],
        recipe: Recipe | None,
        sources: Sequence[Any],
        are_transposed: tuple[bool, ...],
        *parameters: Tensor | None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Keeps the weights, and X or what it was made of."""
        # Python's calls are a tenth of the time of small layers: none that can be left out is made here or below.
        count, device, ctx.dtype = len(are_transposed), X.device.type, X.dtype
        ctx.autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        if ctx.autocast is not None and ctx.dtype != torch.float64:
            X = X.to(ctx.autocast[1])  # once, where each product would do it
        ctx.set_materialize_grads(False)
        ctx.recipe, ctx.are_transposed, ctx.shape, ctx.others = recipe, are_transposed, X.shape, sources
        ctx.exchange = exchange
        if recipe is None:
            ctx.save_for_backward(*parameters[:count], X)
        else:
            kept = [source if isinstance(source, Tensor) else None for source in sources]
            ctx.others = [None if isinstance(source, Tensor) else source for source in sources]
            ctx.save_for_backward(*parameters[:count], *kept)
        rows = X if X.dim() == 2 else X.reshape(-1, X.shape[-1])
        results = []
        for place in range(count):
            W: Any = parameters[place]
            result = multiply(rows, W.T if are_transposed[place] else W, parameters[count + place])
            # As torch's own layers do it: no view, so that what comes after may write over it.
            results.append(result if rows is X else _unsafe_view(result, (*X.shape[:-1], result.shape[-1])))
        return tuple(results) if count > 1 else results[0]

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """X again, as it was made, for the gradients of the weights alone."""
        return _differentiated(ctx, *gradients)


def _differentiated(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of what `_Layers` was called with."""
    saved = ctx.saved_tensors  # unpacked once: hooks may read them from a disk
    rows = [G if G is None or G.dim() == 2 else G.reshape(-1, G.shape[-1]) for G in gradients]
    group, shares = ctx.exchange
    if group is None or not ctx.needs_input_grad[0]:
        found = _of_parameters(ctx, rows, saved)  # first, so that X and its gradient are not there at once
        total = _of_input(ctx, rows, saved) if ctx.needs_input_grad[0] else None
    else:
        part = _of_input(ctx, rows, saved)
        assert part is not None  # autograd calls with at least one gradient
        finish = begin_sum(part, group) if shares is None else begin_reduce_scatter(part, shares[0], shares[1], group)
        found = _of_parameters(ctx, rows, saved)
        total = finish()
    return total, None, None, None, None, None, *found


def _of_parameters(ctx: Any, rows: Sequence[Tensor | None], saved: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of weights and biases that are asked for, of the rows [N, outputs] of each layer's gradient."""
    count, wanted = len(ctx.are_transposed), ctx.needs_input_grad[_BEFORE_WEIGHTS:]
    found: list[Tensor | None] = [None] * (2 * count)
    X = None
    for place, G in enumerate(rows):
        if G is None:
            continue
        if wanted[place]:
            X = _input(ctx, saved[count:]).reshape(-1, ctx.shape[-1]) if X is None else X
            found[place] = gradient_of_weight(_alike(X, G), G, saved[place], ctx.are_transposed[place])
        if wanted[count + place]:
            found[count + place] = G.sum(0)
    return found


def _of_input(ctx: Any, rows: Sequence[Tensor | None], saved: Sequence[Tensor]) -> Tensor | None:
    """The gradient of X, of the rows [N, outputs] of each layer's gradient."""
    total = None
    for place, G in enumerate(rows):
        if G is None:
            continue
        right = _alike(saved[place] if ctx.are_transposed[place] else saved[place].T, G)
        if total is None:
            total = multiply(G, right)
            total = total if total.dtype is ctx.dtype else total.to(ctx.dtype)
        else:
            total = add_product(total, G, right)
    return None if total is None else total.view(ctx.shape)


def _alike(tensor: Tensor, other: Tensor) -> Tensor:
    return tensor if tensor.dtype is other.dtype else tensor.to(other.dtype)


def _input(ctx: Any, kept: Sequence[Tensor | None]) -> Tensor:
    """What the layers read, in the type that it was."""
    if ctx.recipe is None:
        (X,) = kept
        assert X is not None
        return X
    sources = [other if tensor is None else tensor for tensor, other in zip(kept, ctx.others, strict=True)]
    if ctx.autocast is None:
        made: Tensor = ctx.recipe.make(sources)
        return made
    device, low = ctx.autocast
    with torch.autocast(device, low, cache_enabled=False):
        made = ctx.recipe.make(sources)
    return made
