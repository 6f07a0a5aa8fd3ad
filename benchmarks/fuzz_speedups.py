"""Random networks, with all speed-ups and without: `python -m benchmarks.fuzz_speedups [--cases 1000] [--seed 0]`.

Odd seeds are networks of sequences, even ones of images.

In float64 both must agree to 1e-9. In float32 what is recomputed must have the same bits, and all speed-ups together
may be no further from float64 than a bound. Whatever is not so is printed with its seed and makes the exit code 1.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tests.invariants.random_networks import draw_images, image_data
from tests.invariants.random_sequences import draw_sequences, sequence_data
from tests.invariants.random_training import ALL, NONE, distance, is_same, of_any_size, train

from benchmarks.fuzz import seeds_asked_for

OF_FLOAT64, OF_FLOAT32 = 1e-9, 1e-4
"""Bounds of losses and weights after three updates; float32 may also be 20 times as far as without any speed-up."""


KINDS: Mapping[str, tuple[Any, Any, float]] = {
    "images": (draw_images, image_data, 0.05),
    "sequences": (draw_sequences, sequence_data, 0.002),
}
"""Drawing, data and learning rate; sequences without norms magnify what an update changes."""
LARGEST_LOSS = 100.0
"""A network beyond it diverges, and would only magnify rounding."""


def try_one(seed: int, kind: str = "images") -> list[str]:
    """What is wrong with the training of one network; nothing, if all is well."""
    draw, data_of, rate = KINDS[kind]
    shape: dict[str, Any] = {
        "rate": rate,
        "batch": 3 if seed % 7 == 0 else (4, 4, 4, 1)[seed % 4],
        "accumulation": 1 + (seed % 3 == 0),
    }
    wide, narrow = draw(seed, np.float64), draw(seed)
    wide_data, data = data_of(12, np.float64), data_of(12)
    wrong = []
    exact = train(wide, wide_data, NONE, **shape)  # with the sizes from which on kernels differ from torch's: none does
    if not max(exact.losses) < LARGEST_LOSS:
        return []
    with of_any_size():
        apart = distance(train(wide, wide_data, ALL, **shape), exact)
        if not apart < OF_FLOAT64:
            wrong.append(f"in float64 {apart:.1e} apart")
        found = train(narrow, data, ALL, **shape)
        if not is_same(found, train(narrow, data, replace(ALL, again=False), **shape)):
            wrong.append("what is made again changes bits")
        apart = distance(found, exact)
        if not apart < OF_FLOAT32 and not apart < 20 * distance(train(narrow, data, NONE, **shape), exact):
            wrong.append(f"in float32 {apart:.1e} from float64")
    return wrong


def main() -> int:
    seeds = seeds_asked_for(__doc__, 1000)
    failures, started = 0, time.perf_counter()
    for seed in seeds:
        try:
            wrong = try_one(seed // 2, ("images", "sequences")[seed % 2])
        except Exception as error:
            wrong = [f"{type(error).__name__}: {str(error)[:200]}"]
        failures += bool(wrong)
        for text in wrong:
            print(f"seed {seed}: {text}", flush=True)
    print(f"{len(seeds):,} networks in {time.perf_counter() - started:.0f} s, {failures} that do not train alike")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
