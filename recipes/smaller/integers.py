"""A small classifier of scikit-learn's digits as an integer model: quantized after training, and trained for it.

Its hidden units have unequal ranges, as channels of many vision models do: the float network computes the same, but one
scale for all of them rounds the small ones away. `python integers.py` prints test accuracies for several seeds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from students import HIDDEN, accuracy, digits, save_student

import onward
from onward.artifacts.trained_model import convert_model
from onward.data.shard_writer import ShardWriter

SCALES = {"optimizer_attributes": [{"weights": "*_scale", "learning_rate_factor": 0.01}]}


def fitted(path: Path, data: dict[str, np.ndarray], name: str, rate: float, **parameters: object) -> Path:
    """The file of the trained model."""
    result = onward.fit(
        path, data, loss="cross_entropy", epochs=15, batch_size=20, learning_rate=rate, parameters=parameters,
        progress=False,
    )  # fmt: skip
    return result.export(path.with_name(name))


def unbalance(path: Path, seed: int) -> Path:
    """Makes hidden units up to 1,024 times larger, what reads them smaller: with a ReLU between, the same function."""
    model = onnx.load(path)
    factors = 2.0 ** np.random.default_rng(seed).uniform(0, 10, HIDDEN).astype(np.float32)
    by = {"w1": factors, "b1": factors, "w2": 1 / factors[:, None]}
    for tensor in model.graph.initializer:
        if tensor.name in by:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * by[tensor.name], tensor.name))
    onnx.save(model, path.with_name(f"{seed}_unbalanced.onnx"))
    return path.with_name(f"{seed}_unbalanced.onnx")


def main() -> None:
    """Trains, quantizes in two ways, and prints a table."""
    parser = argparse.ArgumentParser(description="Integer models of scikit-learn's digits.")
    parser.add_argument("--seeds", type=int, default=5, help="how many models (5)")
    seeds, (data, _, test) = parser.parse_args().seeds, digits()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shards").mkdir()
        with ShardWriter(folder / "shards" / "0.pb") as writer:
            for image in data["X"][:128]:
                writer.write({"X": image})
        for seed in range(seeds):
            first = fitted(save_student(folder / f"{seed}.onnx", seed), data, f"{seed}_float.onnx", 3e-3)
            model = unbalance(first, seed)
            shards = folder / "shards"
            static = convert_model(model, folder / "static.onnx", quantize="int8-static", calibration_dir=shards)
            found = [accuracy(model, test), accuracy(static, test)]
            for observer in ("lsq", "moving_average"):
                asked = {"weights": "int8", "observer": observer}
                aware = fitted(model, data, "aware.onnx", 1e-3, quantize_aware=asked, optimizer=SCALES)
                found.append(accuracy(aware, test))
            rows.append(found)
            sys.stdout.write(f"seed {seed}: " + ", ".join(f"{value:.2%}" for value in found) + "\n")
    sys.stdout.write("mean: " + ", ".join(f"{value:.2%}" for value in np.mean(rows, axis=0)) + "\n")


if __name__ == "__main__":
    main()
