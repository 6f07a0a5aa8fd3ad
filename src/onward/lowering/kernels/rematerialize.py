"""Tensors that autograd asks for in the backward pass and that are recomputed then, from what is kept anyway.

A batch normalization keeps its input: what it gives, a sum with it, and the activation after it are a pass each away.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from onward.lowering.program import Program

LEAST_BYTES = 2**18
"""Smaller tensors are kept: recomputing them takes longer than all else that is done with them."""

LONGEST_CHAIN = 16
"""Tensors that are computed one from the other, as through the sums of residual blocks, before one is kept."""

_on: ContextVar[bool] = ContextVar("rematerialization", default=False)


_remade: ContextVar[tuple[tuple[weakref.ref[torch.UntypedStorage], Rematerialization], ...]] = ContextVar(
    "remade", default=()
)
"""Memory of tensors that the operator being called is to make again, and how."""


def with_rematerialization(program: Program) -> Program:
    """A program that keeps less for its backward pass, where its operators know how; its code is called as it is."""
    run = program.run or program.code
    run = run.forward if isinstance(run, fx.GraphModule) else run  # nothing hooks onto it

    def run_rematerializing(*arguments: Any) -> tuple[Any, ...]:
        token = _on.set(True)
        try:
            return run(*arguments)
        finally:
            _on.reset(token)

    return replace(program, run=run_rematerializing)


def is_worth_rematerializing(tensor: Tensor) -> bool:
    """Whether a tensor that an operator makes, and that autograd may keep, is worth recomputing."""
    return tensor.requires_grad and _is_large(tensor)


def _is_large(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling() or not _on.get() or not torch.is_grad_enabled():
        return False
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() >= LEAST_BYTES


class Rematerialization:
    """How a tensor is recomputed; whoever is promised it takes it once.

    Args:
        make: makes a new one, with the same bits and layout.
        sources: others of its kind, which `make` takes.
        depth: how many are computed one from the other.
    """

    def __init__(self, make: Callable[[], Tensor], sources: Sequence[Rematerialization] = (), depth: int = 0) -> None:
        self.make = make
        self.sources = sources
        self.depth = depth
        self._first: Callable[[], Tensor | None] = _nothing
        self._again: Tensor | None = None
        self._waiting = 0

    def stand_for(self, tensor: Tensor) -> Tensor:
        """From now on operators that read this very tensor know how it is made."""
        self._first = weakref.ref(tensor)
        tensor._rematerialization = self  # type: ignore[attr-defined]
        return tensor

    def promise(self) -> None:
        """One more will take it."""
        if not self._waiting:
            for source in self.sources:
                source.promise()
        self._waiting += 1

    def take(self) -> Tensor:
        """The tensor itself, if somebody else has held it, or one for all to whom it was promised.

        Raises:
            RuntimeError: a gradient of gradients is asked for, which would not flow through it.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "what follows a batch normalization is recomputed in the backward pass, which has no gradient itself: "
                "set `recompute.cheap_activations: false` to take gradients of gradients."
            )
        self._waiting = max(self._waiting - 1, 0)
        found = self._first()
        if found is None:
            found = self.make() if self._again is None else self._again
            self._again = found if self._waiting else None
        return found.detach()


def _nothing() -> None:
    return None


class Kept(Rematerialization):
    """A tensor that stays until the backward pass anyway."""

    def __init__(self, tensor: Tensor) -> None:
        same = tensor.detach()  # the tensor itself would hold itself, through this
        super().__init__(lambda: same)


def of(tensor: Any) -> Rematerialization | None:
    """How a tensor is recomputed, or that it is kept, if that is known."""
    if torch.compiler.is_compiling() or not _on.get():
        return None
    return getattr(tensor, "_rematerialization", None)


class _Constant(Rematerialization):
    """A tensor without a gradient, computed for everybody who asks."""

    def promise(self) -> None:
        """Nothing is kept for anybody."""

    def take(self) -> Tensor:
        """A new one; gradients of gradients flow past it."""
        with torch.no_grad():
            return self.make()


@dataclass(frozen=True)
class _View:
    """Instead of a saved tensor stored in the memory of one that is recomputed."""

    full: Rematerialization
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _instead(X: Tensor, how: Rematerialization, otherwise: Rematerialization | None = None) -> saved_tensors_hooks:
    """A context in which what is saved of X's memory is recomputed, and other tensors, too, where it is said how."""
    storage = weakref.ref(X.untyped_storage())  # autograd holds the hook as long as what it saves

    def put(saved: Tensor) -> Tensor | _View:
        full = how if saved.untyped_storage() is storage() else otherwise
        if full is None:
            return saved
        full.promise()
        return _View(full, saved.size(), saved.stride(), int(saved.storage_offset()))

    return saved_tensors_hooks(put, _take)


def _take(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    return packed.full.take().as_strided(packed.size, packed.stride, packed.offset)


def saved_tensor_hook(X: Tensor) -> contextlib.AbstractContextManager[Any]:
    """What operators keep of X in here is recomputed, if it can be; other tensors they keep."""
    how = of(X)
    if how is None or isinstance(how, Kept):
        return contextlib.nullcontext()
    return _instead(X, how)


def recomputed(
    tensor: Tensor, make: Callable[[], Tensor], sources: Sequence[Any]
) -> contextlib.AbstractContextManager[Any]:
    """What operators keep of a constant tensor in here is recomputed; one that is a view of its sources is kept."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return contextlib.nullcontext()
    own = tensor.untyped_storage()
    if any(isinstance(source, Tensor) and source.untyped_storage() is own for source in sources):
        return contextlib.nullcontext()
    return _instead(tensor, _Constant(make))


@contextlib.contextmanager
def recomputed_with_gradient(tensor: Tensor, make: Callable[[], Tensor]) -> Iterator[None]:
    """What operators keep of a large tensor that has a gradient is recomputed, in here and in contexts within."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or tensor.nbytes < LEAST_BYTES:
        yield
        return
    # Of nested hooks, torch calls the innermost alone.
    known = (*_remade.get(), (weakref.ref(tensor.untyped_storage()), Rematerialization(make)))
    token = _remade.set(known)

    def put(saved: Tensor) -> Tensor | _View:
        for storage, whole in known:
            if saved.untyped_storage() is storage():
                whole.promise()
                return _View(whole, saved.size(), saved.stride(), int(saved.storage_offset()))
        return saved

    try:
        with saved_tensors_hooks(put, _take):
            yield
    finally:
        _remade.reset(token)


def normalized(X: Tensor, Y: Tensor, scale: Tensor, B: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Y, which is X [N, C, ...] normalized by a batch's mean and inverse deviation [C], scaled and shifted.

    torch's kernel has no call for that. With a variance of 1 and the scale times the inverse deviation, which is what
    it begins with itself, it gives the same bits.
    """
    if Y.stride() != X.stride() or not is_worth_rematerializing(Y):
        return Y
    x, scale, B, mean, inverse = (tensor.detach() for tensor in (X, scale, B, mean, inverse))
    return Rematerialization(
        lambda: torch.native_batch_norm(x, inverse * scale, B, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    ).stand_for(Y)


def summed(A: Tensor, B: Tensor) -> Tensor:
    """`A + B`, recomputed where one is a normalization's result and the other kept, or recomputed as well."""
    total = A + B
    first, second = of(A), of(B)
    if first is None or second is None or not is_worth_rematerializing(total):
        return total
    if isinstance(first, Kept) or first.depth:
        first, second = second, first
    alike = _form(A) == _form(B) == _form(total)
    if isinstance(first, Kept) or first.depth or second.depth == LONGEST_CHAIN or not alike:
        return total
    fresh, other = first, second
    return Rematerialization(lambda: fresh.make().add_(other.take()), (other,), other.depth + 1).stand_for(total)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def activated(X: Tensor, function: Callable[[Tensor], Tensor], again: Callable[[Tensor], Tensor]) -> Tensor:
    """`function(X)`, element by element, recomputed by `again`, which may write over what it is given."""
    how = of(X)
    if how is None or isinstance(how, Kept) or not is_worth_rematerializing(X):
        return function(X)
    own = Rematerialization(lambda: again(how.make()), how.sources, how.depth)
    with _instead(X, how, own):
        result = function(X)
    return own.stand_for(result)


def rectified(X: Tensor) -> Tensor:
    """`relu(X)`; torch keeps the result, which is not kept if it can be recomputed."""
    result = activated(X, torch.relu, torch.relu_)
    return Kept(result).stand_for(result) if of(result) is None and is_worth_rematerializing(result) else result


def to_memory_format(X: Tensor, layout: torch.memory_format) -> Tensor:
    """X in a layout; images that come in another one, and that nobody changes, are turned again."""
    result = X.contiguous(memory_format=layout)
    if result is X or X.requires_grad or not _is_large(result):
        return result
    return Rematerialization(lambda: X.contiguous(memory_format=layout)).stand_for(result)
