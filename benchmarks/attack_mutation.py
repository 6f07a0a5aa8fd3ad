"""Coverage-guided mutation: inputs that make onward's own code run lines it has not run yet are kept and changed again.

No native code is instrumented: what is looked for are exceptions that are no errors of the user, in the readers.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import onward
from benchmarks.attack_row import Result, outcome

_SOURCE = str(Path(onward.__file__).parent)
_INTERESTING = (
    b"", b"\x00", b"\xff" * 8, b"-1", b"0", b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"9" * 5000,
    b"4611686018427387904", b"../x", b"/dev/zero", b"[" * 2000, b"{" * 2000, b"\xf0\x9f\x98\x80", b"\xed\xa0\x80",
    (2**40).to_bytes(8, "little"), (2**31).to_bytes(4, "little"), (2**62).to_bytes(8, "little"), b"&a *a", b"!!int ",
)  # fmt: skip


class _Coverage:
    """Lines of onward that ran while it was active, and in which order two followed each other."""

    def __init__(self) -> None:
        self.edges: set[tuple[CodeType, int, int]] = set()

    def __enter__(self) -> _Coverage:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_SOURCE):
            return None
        last = 0

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                self.edges.add((frame.f_code, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line


def mutate(source: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to four changes: bytes, numbers, known troublemakers, pieces repeated, dropped or of another input."""
    broken = bytearray(data)
    for _ in range(source.randrange(1, 5)):
        at, size = source.randrange(len(broken) + 1), source.randrange(1, 17)
        kind = source.randrange(6)
        if kind == 0 and at < len(broken):
            broken[at] = source.randrange(256)
        elif kind == 1:
            del broken[at : at + size]
        elif kind == 2:
            broken[at:at] = broken[at : at + size] * source.randrange(1, 4)
        elif kind == 3:
            broken[at : at + source.choice((0, 1, 8))] = source.choice(_INTERESTING)
        elif kind == 4 and at < len(broken):
            broken[at] ^= 1 << source.randrange(8)
        else:
            other = source.choice(others)
            start = source.randrange(len(other) + 1)
            broken[at : at + size] = other[start : start + size]
    return bytes(broken)


def explore(target: Callable[[bytes], object], seeds: Sequence[bytes], seconds: float, seed: int) -> Result:
    """Tries mutations of `seeds` for so long; what runs new lines joins them."""
    lost: dict[Any, Any] = {}
    source, corpus = random.Random(seed), [*seeds]
    known: set[tuple[CodeType, int, int]] = set()
    tried, end = 0, time.monotonic() + seconds
    for data in seeds:
        _try(target, data, known)
    while time.monotonic() < end:
        data = mutate(source, source.choice(corpus), corpus)
        before, tried = len(known), tried + 1
        wrong = _try(target, data, known)
        if wrong:
            lost.setdefault(wrong.partition(":")[0] + wrong[-40:], f"{wrong} ({data[:80]!r}...)")
        elif len(known) > before and len(data) < 100_000:
            corpus.append(data)
    return Result(tried, tried - len(lost), tuple(lost.values()))


def _try(target: Callable[[bytes], object], data: bytes, known: set[tuple[CodeType, int, int]]) -> str:
    with _Coverage() as coverage:
        wrong = outcome(lambda: target(data))
    known |= coverage.edges
    return wrong
