"""Runs of every layout killed with SIGKILL at random moments: how many, what was lost, and who was left behind.

    python -m benchmarks.killed_ranks [--kills 1000] [--layouts "ZeRO 2,pipeline"] [--seed 1]

The launcher, a rank or all processes are killed in start-up, training, while a checkpoint is saved and while the
trained model is written. Ranks that onward's launcher started are restarted by it; else the same command is started
again, until the run comes to its end. Its weights are compared bit by bit with those of a run that was never killed.
Prints a table in Markdown; ends with exit code 1 if anything differs or is left behind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.invariants.killing import LAYOUTS, Arena, Tally

COLUMNS = {
    "start-up": "start-up", "any": "training", "save": "save", "export": "export",
    "launcher": "the launcher", "a rank": "a rank", "all": "all processes",
}  # fmt: skip
"""Words of a kind of kill, and the heading of their column."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="over all layouts (1000)")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    layouts = asked.layouts.split(",")
    headings = ["layout", "kills", *COLUMNS.values(), "runs", "differing", "left behind", "slowest end s", "s a kill"]
    print("|".join(["", *(f" {heading} " for heading in headings), ""]))
    print("|" + "---|" * len(headings), flush=True)
    tallies = []
    for number, layout in enumerate(layouts):
        kills = asked.kills // len(layouts) + (number < asked.kills % len(layouts))
        with tempfile.TemporaryDirectory() as folder:
            tallies.append(Arena(Path(folder) / "arena", layout, asked.seed).kill(kills))
        print(row(layout, tallies[-1]), flush=True)
    held = all(tally.is_held for tally in tallies)
    print(f"\n{sum(tally.count() for tally in tallies)} kills: {'all held' if held else 'NOT all held'}")
    sys.exit(not held)


def row(layout: str, tally: Tally) -> str:
    """A line of the table; left behind are processes and temporary files."""
    counts = [tally.count(), *(tally.count(word) for word in COLUMNS)]
    left = tally.orphans + tally.leftovers
    times = [f"{tally.slowest_seconds:.1f}", f"{tally.seconds / max(tally.count(), 1):.1f}"]
    cells = [layout, *map(str, counts), str(tally.runs), str(tally.differing), str(left), *times]
    return "|".join(["", *(f" {cell} " for cell in cells), ""])


if __name__ == "__main__":
    main()
