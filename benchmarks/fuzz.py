"""Models broken at random, by the thousand: `python -m benchmarks.fuzz [--cases 10000] [--seed 0]`.

Half have bytes changed, half their structure. Every one must be read or refused with a user's error; anything else is
printed with its case number and makes the exit code 1. A few hundred such cases run in the test suite.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import onnx
from tests.graph.mutation import mutate_bytes, mutate_structure, seed_model

from onward import to_torch
from onward.errors import UserError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph

LOSS = LossSpec(type="softmax_cross_entropy", prediction="y", label="labels")


def try_one(seed: int, model: onnx.ModelProto, data: bytes, path: Path) -> str:
    """Reads, gives a loss to and lowers one broken model; says how it went."""
    source = random.Random(seed)
    if seed % 2:
        path.write_bytes(mutate_bytes(source, data))
        broken: onnx.ModelProto | Path = path
    else:
        broken = mutate_structure(source, model)
    try:
        make_training_graph(broken, loss=LOSS)
        to_torch(broken)
    except UserError as error:
        return type(error).__name__
    return "whole still"


def seeds_asked_for(description: str | None, cases: int) -> range:
    """What the command line asks for, `cases` by default; from here on nothing warns."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    return range(options.seed, options.seed + options.cases)


def main() -> int:
    seeds = seeds_asked_for(__doc__, 10_000)
    model = seed_model()
    data = model.SerializeToString()
    outcomes: Counter[str] = Counter()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for case in seeds:
            try:
                outcomes[try_one(case, model, data, Path(folder) / "m.onnx")] += 1
            except Exception as error:
                outcomes["BARE EXCEPTION"] += 1
                print(f"case {case}: {type(error).__name__}: {str(error)[:200]}")
    print(f"{len(seeds):,} broken models in {time.perf_counter() - started:.0f} s")
    for outcome, count in outcomes.most_common():
        print(f"  {outcome:20} {count:7,}")
    return int(outcomes["BARE EXCEPTION"] > 0)


if __name__ == "__main__":
    sys.exit(main())
