"""A tuple of names that does not compare them all to find one."""

from __future__ import annotations

from onward.graph.ordered_names import OrderedNames


class Compared(str):
    """A name that counts how often it is compared."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_one_name_is_found_without_comparing_all() -> None:
    names = OrderedNames(Compared(f"w{index}") for index in range(1000))
    assert "w999" in names
    assert "w1000" not in names
    Compared.count = 0
    assert all(f"w{index}" in names for index in range(1000))
    assert Compared.count < 1100  # a tuple compares 500,000 times
    assert names == tuple(names)
    assert names[1:3] == ("w1", "w2")
