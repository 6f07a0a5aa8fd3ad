"""What operators must know of their pass: whether it is recomputed (then running statistics stay) or traced."""

from __future__ import annotations

from contextvars import ContextVar, Token

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

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
    """Whether the code runs, with numbers or for a forecast: not while torch traces it, which would fix loops."""
    is_known = type(tensor) is Tensor or (isinstance(tensor, FakeTensor) and get_proxy_mode() is None)
    return is_known and all(isinstance(size, int) for size in tensor.shape)


def is_traced() -> bool:
    """Whether a pass is being written as a graph, in which a kernel needs a backward pass of standard operators."""
    return not torch.compiler.is_compiling() and get_proxy_mode() is not None
