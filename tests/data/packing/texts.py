"""Text that is packed, and the shards that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from onward.data import DataLoader
from onward.data.packing import PackOptions, TextOptions, pack

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "mix",
    "potions",
]


def make_text(lines: int, seed: int = 0) -> str:
    random = np.random.default_rng(seed)
    return "".join(" ".join(random.choice(WORDS, random.integers(4, 12))) + ".\n" for _ in range(lines))


def pack_text(source: Path, dest: Path, test_fraction: float = 0.0, seed: int = 0, **options: Any) -> Any:
    return pack(
        source, dest, PackOptions(source=TextOptions(**options), test_fraction=test_fraction, seed=seed, progress=False)
    )


def load(folder: Path) -> dict[str, np.ndarray]:
    batches = list(DataLoader({}, folder).one_pass(1000))
    return {name: np.concatenate([batch.features[name] for batch in batches]) for name in batches[0].features}
