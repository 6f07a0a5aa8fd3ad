"""Runs of every layout killed with SIGKILL at random moments: how many, what was lost, and who was left behind.

    python -m benchmarks.killed_ranks [--kills 1000] [--layouts "ZeRO 2,pipeline"] [--seed 1]

A rank or all of them are killed in start-up, training, while a checkpoint is saved and while the trained model is
written; the run is started again until it comes to its end, and its weights are compared bit by bit with those of a
run that was never killed. Ends with exit code 1 if anything differs or is left behind.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.invariants.killing import LAYOUTS, MOMENTS, Arena, Tally


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=1000, help="over all layouts")
    arguments.add_argument("--layouts", default=",".join(LAYOUTS))
    arguments.add_argument("--seed", type=int, default=1)
    asked = arguments.parse_args()
    layouts = asked.layouts.split(",")
    print(f"{'layout':<24}{'kills':>6}", *(f"{moment:>10}" for moment in MOMENTS), end="")
    print(f"{'runs':>6}{'differing':>11}{'left behind':>13}{'slowest end s':>15}{'s a kill':>10}")
    tallies = []
    for number, layout in enumerate(layouts):
        kills = asked.kills // len(layouts) + (number < asked.kills % len(layouts))
        with tempfile.TemporaryDirectory() as folder:
            arena = Arena(Path(folder) / "arena", layout, asked.seed)
            started = time.monotonic()
            tally = arena.kill(kills)
            tallies.append(tally)
            print(row(layout, tally, (time.monotonic() - started) / max(kills, 1)), flush=True)
    held = all(tally.is_held for tally in tallies)
    print(f"{sum(sum(tally.kills.values()) for tally in tallies)} kills: {'all held' if held else 'NOT all held'}")
    sys.exit(not held)


def row(layout: str, tally: Tally, seconds: float) -> str:
    """A line of the table."""
    counts = [sum(n for kind, n in tally.kills.items() if kind.endswith(moment)) for moment in MOMENTS]
    return (
        f"{layout:<24}{sum(tally.kills.values()):>6} "
        + " ".join(f"{count:>10}" for count in counts)
        + f"{tally.runs:>6}{tally.differing:>11}{tally.orphans:>13}{tally.slowest_seconds:>15.1f}{seconds:>10.1f}"
    )


if __name__ == "__main__":
    main()
