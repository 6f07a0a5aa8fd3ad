"""Names in messages: those that are expected, and the nearest of them to one that is misspelled."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.5) -> str:
    """A question with the nearest names, with a space before it; "" where none is near.

    Args:
        name: as it was written.
        known: what could have been meant.
        most: names in the question at most.
        cutoff: how near they must be, from 0 to 1 for the name itself.
    """
    near = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def listed(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join([", ".join(words[:-1]), *words[-1:]] if len(words) > 1 else words)


def shortened(words: Iterable[str], most: int, separator: str = ", ") -> str:
    """`a, b and 3 more`: the first words, and how many others there are; with "; " between them `a; b; and 3 more`."""
    every = list(words)
    shown = separator.join(every[:most])
    return shown if len(every) <= most else f"{shown}{separator.strip(', ')} and {len(every) - most} more"
