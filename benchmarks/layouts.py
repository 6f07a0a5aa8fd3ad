"""Every layout against one process: `python -m benchmarks.layouts [--models gpt2 ...] [--world 2 4 8] [--updates 20]`.

Every combination of data, horizontal and pipeline size whose product is the number of ranks, with each option that fits
it. Printed is, for each, the worst relative difference of a loss and of a weight (of its largest element).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, Result, differences, train
from tests.invariants.rank_pool import end_ranks

MODELS = ["gpt2", "bert", "squeezenet_64", "u_net_64", "tied_words"]
Sections = Mapping[str, Mapping[str, Any]]
OPTIONS: dict[str, Sections] = {
    "plain": {},
    "clipping": {"optimizer": {"max_norm_clip": 0.1}},
    "LAMB": {
        "optimizer": {"training_optimizer_name": "Lamb", "optimizer_attributes": [{"lambda": 0.1, "epsilon": 1e-4}]}
    },
    "recompute": {"recompute": {"segments": True}},
    "bf16": {"mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True}},
    "fp16": {"mixed_precision": {"use_mixed_precision": True, "loss_scale": 0}},
}
ACCUMULATION = 4


def layouts(world_size: int, model: str) -> Iterator[Layout]:
    """Sizes that fit, with each stage of ZeRO where there are replicas."""
    for data, horizontal, pipeline in itertools.product((1, 2, 4, 8), repeat=3):
        if data * horizontal * pipeline != world_size:
            continue
        batch_norm = {"synchronize_batch_norm": True} if "u_net" in model and data > 1 else {}
        for stage in range(4 if data > 1 else 1):
            yield Layout(data, horizontal, pipeline, {**({"zero_stage": stage} if stage else {}), **batch_norm})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--models", nargs="+", default=MODELS, choices=sorted(CASES))
    arguments.add_argument("--world", nargs="+", type=int, default=[2, 4, 8])
    arguments.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    arguments.add_argument("--updates", type=int, default=20)
    asked = arguments.parse_args()

    @functools.cache
    def alone(model: str, sections: str) -> Result:
        return train(
            CASES[model], Layout(), accumulation=ACCUMULATION, updates=asked.updates, sections=json.loads(sections)
        )

    print(f"{'model':<15}{'layout':<34}{'option':<11}{'losses':>9}{'weights':>9}{'s':>7}")
    worst: dict[tuple[str, str], tuple[float, float]] = {}
    for world_size, model in itertools.product(asked.world, asked.models):
        for layout, option in itertools.product(layouts(world_size, model), asked.options):
            started, sections = time.monotonic(), OPTIONS[option]
            try:
                expected = alone(model, json.dumps(sections))
                actual = train(
                    CASES[model], layout, accumulation=ACCUMULATION, updates=asked.updates, sections=sections
                )
            except AssertionError as error:
                line = str(error).strip().splitlines()[-1]
                print(f"{model:<15}{layout!s:<34}{option:<11} refused: {line}", flush=True)
                continue
            loss, weight = differences(actual, expected)
            seconds = time.monotonic() - started
            print(f"{model:<15}{layout!s:<34}{option:<11}{loss:>9.1e}{weight:>9.1e}{seconds:>7.1f}", flush=True)
            before = worst.get((model, option), (0.0, 0.0))
            worst[model, option] = (max(before[0], loss), max(before[1], weight))
    end_ranks()
    print("\nworst of all layouts")
    for (model, option), (loss, weight) in worst.items():
        print(f"{model:<15}{option:<11}{loss:>9.1e}{weight:>9.1e}")


if __name__ == "__main__":
    main()
