"""Test accuracy of an exported classifier in ONNX Runtime.

`python accuracy.py out/mnist_trained.onnx digits_test.npz`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import onnxruntime


def accuracy(model: Path, arrays: Path) -> tuple[float, int]:
    """Share of images whose likeliest class is their label, and their number."""
    with np.load(arrays, allow_pickle=False) as archive:
        images, labels = archive["images"], archive["labels"]
    session = onnxruntime.InferenceSession(model)
    (scores,) = session.run(None, {session.get_inputs()[0].name: images})
    return float((scores.argmax(1) == labels).mean()), len(labels)


def main() -> None:
    """Reads the command line and prints one sentence."""
    parser = argparse.ArgumentParser(description="Accuracy of a classifier in ONNX Runtime.")
    parser.add_argument("model", type=Path, help="the ONNX file that onward exported")
    parser.add_argument("arrays", type=Path, help="an .npz file with the arrays images and labels")
    options = parser.parse_args()
    for path in (options.model, options.arrays):
        if not path.is_file():
            parser.error(f"{str(path)!r} does not exist; train and export first, as README.md says")
    share, count = accuracy(options.model, options.arrays)
    sys.stdout.write(f"{options.model}: {share:.2%} of {count} images right\n")


if __name__ == "__main__":
    main()
