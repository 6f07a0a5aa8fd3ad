"""Names in an order, of which one is found by its hash: a network has thousands of weights, often asked for."""

from __future__ import annotations

from functools import cached_property


class OrderedNames(tuple[str, ...]):
    """A tuple of names; whether one is among them takes the same time for any number of them."""

    @cached_property
    def _hashed(self) -> frozenset[str]:
        return frozenset(self)

    def __contains__(self, name: object) -> bool:
        return name in self._hashed
