"""What operators must know of their pass: whether it is recomputed (then running statistics stay) or traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

P = ParamSpec("P")
R = TypeVar("R")

_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


class Recomputation:
    """A context: what runs inside of it was computed before, and running statistics stay as they are.

    It can be entered several times, since schedules that split a backward pass repeat a forward pass twice.
    """

    def __init__(self) -> None:
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self._tokens.append(_recomputing.set(True))

    def __exit__(self, *failure: object) -> None:
        _recomputing.reset(self._tokens.pop())


def is_recomputing() -> bool:
    """Whether a forward pass is repeated for the sake of its backward pass; who compiles, compiles both ways."""
    return _recomputing.get()


# torch's compiler cannot look into context variables; so marked, it asks while it traces. The decorator that does this,
# torch.compiler.assume_constant_result, would import the entire compiler with onward.
is_recomputing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_plain(tensor: Tensor) -> bool:
    """Whether the code runs, with numbers or for a forecast: not while torch traces it, which would fix loops.

    Nor within `torch.func`, whose transforms take none of the functions that are written for autograd.
    """
    if torch._C._are_functorch_transforms_active():
        return False
    is_known = type(tensor) is Tensor or (isinstance(tensor, FakeTensor) and get_proxy_mode() is None)
    return is_known and all(isinstance(size, int) for size in tensor.shape)


def is_traced() -> bool:
    """Whether a pass is being written as a graph, in which a kernel needs a backward pass of standard operators."""
    return not torch.compiler.is_compiling() and get_proxy_mode() is not None


def only_first_derivative(backward: Callable[P, R]) -> Callable[P, R]:
    """Decorates the backward function of a `torch.autograd.Function` that has no derivative itself.

    torch's `once_differentiable` says nothing where the gradient that arrives is a number, as that of a sum: it gives
    gradients without a graph, and a penalty on them would train without these terms.

    Raises:
        RuntimeError: by what is returned, in a backward pass of which a graph is kept.
    """
    name = backward.__qualname__.partition(".")[0].lstrip("_")

    @functools.wraps(backward)
    def guarded(*arguments: P.args, **options: P.kwargs) -> R:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"the fast backward pass of {name} has no second derivative. Compute gradients without "
                "create_graph=True; if you need their gradients, call an OnnxModule of "
                "make_training_graph(model, fuse=False) yourself, in one process."
            )
        return backward(*arguments, **options)

    return guarded
