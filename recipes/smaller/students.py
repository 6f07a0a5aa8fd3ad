"""Students of a teacher on scikit-learn's digits: the same small network from the same start, alone and distilled.

`python students.py` prints test accuracies for several seeds; `--seeds N` for fewer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits

import onward
from onward.models import create_model

LABELED, TEST, HIDDEN = 100, 797, 32


def digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Images for the teacher (1,000), the first of them for students (300), and for tests (797)."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = (found.images[order] / 16).astype(np.float32)[:, None]
    labels = found.target[order].astype(np.int64)
    cuts = (slice(TEST, None), slice(TEST, TEST + LABELED), slice(TEST))
    teaching, learning, test = ({"X": images[rows], "labels": labels[rows]} for rows in cuts)
    return teaching, learning, test


def save_student(path: Path, seed: int, opset: int = 17) -> Path:
    """A network of 16 hidden units, from a start that the seed draws."""
    draw = np.random.default_rng(seed).standard_normal
    arrays = {"w1": draw((64, HIDDEN)) / 8, "b1": np.zeros(HIDDEN), "w2": draw((HIDDEN, 10)) / 4, "b2": np.zeros(10)}
    nodes = [
        helper.make_node("Flatten", ["X"], ["pixels"]),
        helper.make_node("Gemm", ["pixels", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "w2", "b2"], ["predictions"]),
    ]
    graph = helper.make_graph(
        nodes,
        "student",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("predictions", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


def accuracy(path: Path, test: dict[str, np.ndarray]) -> float:
    """In ONNX Runtime."""
    (scores,) = onnxruntime.InferenceSession(path).run(None, {"X": test["X"]})
    return float((scores.argmax(1) == test["labels"]).mean())


def trained(path: Path, data: dict[str, np.ndarray], seed: int, epochs: int, **parameters: dict[str, object]) -> Path:
    """The file of the trained model."""
    result = onward.fit(
        path, data, loss="cross_entropy", epochs=epochs, batch_size=20, learning_rate=3e-3, seed=seed,
        parameters=parameters, progress=False,
    )  # fmt: skip
    return result.export(path.with_name(f"{path.stem}_{'distilled' if parameters else 'trained'}.onnx"))


def main() -> None:
    """Trains a teacher and the students, and prints a table."""
    parser = argparse.ArgumentParser(description="Distilled students on scikit-learn's digits.")
    parser.add_argument("--seeds", type=int, default=5, help="how many students of each kind (5)")
    seeds = parser.parse_args().seeds
    teaching, learning, test = digits()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        ir.save(create_model("mnist", variant="conv", image_size=8), path / "teacher.onnx")
        teacher = trained(path / "teacher.onnx", teaching, 0, 12)
        sys.stdout.write(f"teacher, {len(teaching['X'])} images: {accuracy(teacher, test):.2%}\n")
        asked = {"teacher_path": teacher, "temperature": 4.0, "alpha": 0.9}
        gains = []
        for seed in range(seeds):
            student = save_student(path / f"student{seed}.onnx", seed)
            alone = accuracy(trained(student, learning, seed, 80), test)
            distilled = accuracy(trained(student, learning, seed, 80, distillation=asked), test)
            gains.append(distilled - alone)
            sys.stdout.write(f"student {seed}, {LABELED} images: alone {alone:.2%}, distilled {distilled:.2%}\n")
        sys.stdout.write(f"gain: {np.mean(gains):+.2%} in the mean, {min(gains):+.2%} to {max(gains):+.2%}\n")


if __name__ == "__main__":
    main()
