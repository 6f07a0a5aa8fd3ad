"""Twenty ranks killed with SIGKILL at random moments under torchrun: how often, what it cost, and the bits at the end.

    python -m benchmarks.killed_ranks [--kills 20]

Half of the kills come within half a second after a checkpoint, half at any moment, also while ranks are still starting.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.laws.elastic import make_workplace, train_through_kills, train_undisturbed, weights_of

RANKS = 2
LAYOUTS = {"replicas": {}, "ZeRO 2": {"zero_stage": 2}}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=20)
    arguments.add_argument("--steps", type=int, default=4000)
    arguments.add_argument("--seed", type=int, default=1)
    asked = arguments.parse_args()
    print(f"{'layout':<12}{'killed':>8}{'undisturbed s':>15}{'with kills s':>14}{'equal bits':>12}")
    for name, options in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            place = make_workplace(Path(folder), RANKS, asked.steps, **options)
            started = time.monotonic()
            done = train_undisturbed(place, "whole", RANKS)
            assert done.returncode == 0, done.stderr
            whole = time.monotonic() - started
            started = time.monotonic()
            killed, _ = train_through_kills(place, "killed", RANKS, asked.kills, asked.seed)
            through = time.monotonic() - started
            same = weights_of(place / "killed") == weights_of(place / "whole")
            print(f"{name:<12}{killed:>8}{whole:>15.0f}{through:>14.0f}{'yes' if same else 'NO':>12}", flush=True)


if __name__ == "__main__":
    main()
