"""What operators must know of their pass: whether it is a repetition, in which running statistics stay as they are."""

from __future__ import annotations

from contextvars import ContextVar, Token

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
# torch.compiler.assume_constant_result, would import the whole compiler with onward.
is_recomputing._dynamo_marked_constant = True  # type: ignore[attr-defined]
