"""What a row of the table of attacks is, and how a case of it is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from onward.errors import Interrupted, UserError


@dataclass(frozen=True)
class Result:
    """How many cases were tried and held, and a line for each of the others."""

    tried: int
    held: int
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One class of cases.

    Attributes:
        area: what is attacked, in a word.
        name: of the class.
        run: takes the seconds for random cases and a seed.
    """

    area: str
    name: str
    run: Callable[[float, int], Result]


def outcome(attempt: Callable[[], object]) -> str:
    """ "" where an attempt ends well or with an error that exits with 2 or 3; else what went wrong."""
    try:
        attempt()
    except (UserError, Interrupted) as error:
        return "" if str(error).strip() else "an error without a message"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def each(cases: Iterable[tuple[str, Callable[[], object]]]) -> Result:
    """Tries named cases one after the other."""
    tried, lost = 0, []
    for name, attempt in cases:
        tried += 1
        wrong = outcome(attempt)
        if wrong:
            lost.append(f"{name}: {wrong}")
    return Result(tried, tried - len(lost), tuple(lost))
