"""A small shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.shard_writer import ShardWriter

SAMPLES = [
    {"tokens": np.arange(5, dtype=np.int64) + k, "image": np.full((2, 3), k / 2, np.float32), "label": np.int32(k)}
    for k in range(4)
]


def write(path: Path, samples: Sequence[Mapping[str, Any]] = SAMPLES) -> Path:
    with ShardWriter(path) as writer:
        for sample in samples:
            writer.write(sample)
    return path
