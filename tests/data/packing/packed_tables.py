"""Tables that are packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from onward.data import DataLoader
from onward.data.packing import PackOptions, TableOptions, pack


def pack_table(source: Path, dest: Path, **options: Any) -> dict[str, np.ndarray]:
    pack(source, dest, PackOptions(source=TableOptions(**options), progress=False))
    batches = list(DataLoader({}, dest).one_pass(1000))
    return {name: np.concatenate([batch.features[name] for batch in batches]) for name in batches[0].features}
