"""A small classifier of scikit-learn's digits with most of its weights zero: pruned while it is trained further.

`python zeros.py` prints test accuracies for several seeds; `--seeds N` for fewer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from integers import fitted
from students import accuracy, digits, save_student

UPDATES = 15 * 50


def main() -> None:
    """Trains, prunes in several ways, and prints a table."""
    parser = argparse.ArgumentParser(description="Pruned models of scikit-learn's digits.")
    parser.add_argument("--seeds", type=int, default=5, help="how many models (5)")
    seeds, (data, _, test) = parser.parse_args().seeds, digits()
    ways = {
        "2:4": {"pattern": "2:4"},
        **{
            f"{share:.0%}": {"pattern": "magnitude", "sparsity": share, "end_update": UPDATES // 2, "every_updates": 25}
            for share in (0.5, 0.8, 0.9)
        },
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            dense = fitted(save_student(Path(folder) / f"{seed}.onnx", seed), data, "dense.onnx", 3e-3)
            rows.append([accuracy(dense, test)])
            for asked in ways.values():
                rows[-1].append(accuracy(fitted(dense, data, "pruned.onnx", 1e-3, pruning=asked), test))
            sys.stdout.write(f"seed {seed}: " + ", ".join(f"{value:.2%}" for value in rows[-1]) + "\n")
    names = ", ".join(("dense", *ways))
    sys.stdout.write(f"mean of {names}: " + ", ".join(f"{value:.2%}" for value in np.mean(rows, axis=0)) + "\n")


if __name__ == "__main__":
    main()
