"""Calls that become simpler once some of their arguments are known: a mask that hides nothing need not be read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

Simplifier = Callable[[Mapping[str, Any], frozenset[str]], dict[str, Any]]
"""(known arguments by parameter, parameters that are given at all) -> arguments that may take the place of those."""

_simplifiers: dict[Callable[..., Any], Simplifier] = {}


def simplifies(function: Callable[..., Any]) -> Callable[[Simplifier], Simplifier]:
    """Registers how calls of a lowering function become simpler."""

    def register(simplifier: Simplifier) -> Simplifier:
        _simplifiers[function] = simplifier
        return simplifier

    return register


def simpler_arguments(
    function: Any,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    lookup: Callable[[Any], Any],
    earlier: dict[Any, dict[str, Any]],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments for a call that gives the same result with less work; None where there are none.

    Args:
        function: what is called.
        arguments, keywords: what it is called with.
        lookup: gives the value of an argument that is known, else None.
        earlier: what became of earlier calls, by the identity of what was known: all layers read one large mask. The
            caller keeps the known values alive.
    """
    simplifier = _simplifiers.get(function)
    if simplifier is None:
        return None
    bound = inspect.signature(function).bind(*arguments, **keywords)
    known = {name: value for name, given in bound.arguments.items() if (value := lookup(given)) is not None}
    given = frozenset(name for name, value in bound.arguments.items() if value is not None)
    call = (function, given, tuple((name, id(value)) for name, value in known.items()))
    if call not in earlier:
        earlier[call] = simplifier(known, given)
    changes = earlier[call]
    if not changes:
        return None
    bound.arguments.update(changes)
    return bound.args, bound.kwargs
