"""Archives of arrays, and the options of a quiet packing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

QUIET = {"progress": False}


def save(path: Path, count: int = 10) -> Path:
    np.savez(path, x=np.arange(count * 3, dtype=np.float32).reshape(count, 3), label=np.arange(count))
    return path
