"""Writes scikit-learn's bundled handwritten digits as `digits_train.npz` and `digits_test.npz`, for `onward pack`.

1,797 images of 8x8 pixels, 1,437 to train and 360 to test, drawn once with a fixed seed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

TEST_IMAGES = 360
LARGEST_PIXEL = 16


def write_digits(folder: Path) -> dict[str, int]:
    """Writes both files: `images`, float32 [n, 1, 8, 8] in [0, 1], and `labels`, int64 [n]."""
    digits = load_digits()
    images = (digits.images / LARGEST_PIXEL).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"digits_test.npz": order[:TEST_IMAGES], "digits_train.npz": order[TEST_IMAGES:]}
    for name, rows in parts.items():
        np.savez(folder / name, images=images[rows], labels=labels[rows])
    return {name: len(rows) for name, rows in parts.items()}


def main() -> None:
    """Reads the command line, writes the files and says so."""
    parser = argparse.ArgumentParser(description="Write scikit-learn's digits as .npz files.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="where to (default: here)")
    options = parser.parse_args()
    for name, count in write_digits(options.folder).items():
        sys.stdout.write(f"{options.folder / name}: {count} images\n")


if __name__ == "__main__":
    main()
