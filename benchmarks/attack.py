"""Attacks on onward, class by class, and how many of them it holds: `python -m benchmarks.attack [--seconds 60]`.

An attack is held when it succeeds in nothing: the input is read, or refused with a user's error. A row of `ROWS` is one
class of cases; further areas add rows from files `benchmarks/attack_*.py`, each of which has a tuple `ROWS`.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
import warnings
from pathlib import Path

from benchmarks.attack_row import Row


def rows() -> tuple[Row, ...]:
    """The rows of every file `attack_*.py` that has some, in the order of the files' names."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("attack_*.py"))
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    return tuple(row for module in modules for row in getattr(module, "ROWS", ()))


def main() -> int:
    """Runs every row, or those whose names contain a word; 1: something was not held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="run only rows whose names contain one of these")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each row that mutates at random (60)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    lost = 0
    print(f"{'area':<14}{'case class':<46}{'tried':>9}{'held':>9}{'seconds':>9}")
    for row in rows():
        if asked.words and not any(word in f"{row.area} {row.name}" for word in asked.words):
            continue
        began = time.monotonic()
        result = row.run(asked.seconds, asked.seed)
        lost += result.tried - result.held
        took = time.monotonic() - began
        print(f"{row.area:<14}{row.name:<46}{result.tried:>9,}{result.held:>9,}{took:>9.1f}", flush=True)
        for line in result.lost[:5]:
            print(f"    {line}")
    print("all held" if not lost else f"{lost:,} NOT HELD")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
