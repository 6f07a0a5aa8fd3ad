"""Small runs of reference models, trained by `onward train` and by a device bundle with the same batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import yaml

from onward.data.in_memory import InMemoryDataLoader
from onward.device.bundle import write_bundle
from onward.graph.writing.model_saving import save_model
from onward.models import create_model
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.mlp import ON_ONE_THREAD
from tests.watching import Recorder

BATCH, STEPS, TOKENS = 2, 50, 8
SMALL = {"layers": 2, "heads": 2, "width": 16, "vocab_size": 40, "dropout": 0.0}
SAMPLES = BATCH * STEPS


@dataclass(frozen=True)
class ReferenceRun:
    """A model, its loss, data of `SAMPLES` samples, the sizes that are fixed, and sections of its RUN.yaml."""

    model: ir.Model
    loss: Mapping[str, Any]
    features: Mapping[str, np.ndarray]
    sizes: Mapping[str, int]
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def batches(self) -> list[dict[str, np.ndarray]]:
        """One a step."""
        return [{n: a[i * BATCH : (i + 1) * BATCH] for n, a in self.features.items()} for i in range(STEPS)]

    @property
    def accumulation(self) -> int:
        """Steps of an update."""
        return int(self.sections.get("training", {}).get("gradient_accumulation_steps", 1))

    def write(self, folder: Path) -> Path:
        """Model, run and bundle into a folder; returns the bundle."""
        save_model(self.model, folder / "model.onnx")
        known = {s for v in self.model.graph.inputs for s in (v.shape or ()) if not isinstance(s, int)}
        names = {str(size.value) for size in known} | ({"masked"} & {*self.sizes})
        run: dict[str, Any] = {
            "paths": {"model_path": "model.onnx"},
            "loss": dict(self.loss),
            "training": {
                "batch_size": BATCH,
                "num_train_steps": STEPS,
                "display_loss_steps": 1,
                "mapped_dimensions": {name: size for name, size in self.sizes.items() if name in names},
            },
            "optimizer": {"training_optimizer_name": "AdamW", "max_norm_clip": 1.0},
            "learning_rate": {"initial_lr": 1e-3, "warmup_mode": "linear", "warmup_steps": 5},
        }
        for section, fields in self.sections.items():
            run[section] = {**run.get(section, {}), **fields}
        (folder / "run.yaml").write_text(yaml.safe_dump(run))
        return write_bundle(folder / "run.yaml", folder / "bundle")

    def train(self, folder: Path) -> tuple[TrainingRunner, list[float]]:
        """By `onward train`: the runner, and the loss of every update."""
        recorder = Recorder()
        runner = TrainingRunner(Parameters.load(folder / "run.yaml"), ON_ONE_THREAD, [recorder], progress=False)
        runner.initialize()
        runner.run(InMemoryDataLoader(dict(self.features)))
        return runner, recorder.losses

    def losses_of_updates(self, losses: list[float]) -> list[float]:
        """Means of what a device reports of the steps, each of which counts as many labels."""
        return [float(loss) for loss in np.reshape(losses, (-1, self.accumulation)).mean(1)]


def draw(shape: tuple[int, ...], below: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + below).integers(0, below, (SAMPLES, *shape))


def gpt2(**sections: Mapping[str, Any]) -> ReferenceRun:
    model = create_model("gpt2", size="tiny", **SMALL, context_length=TOKENS)
    tokens = draw((TOKENS + 1,), 40)
    loss = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"}
    features = {"input_ids": tokens[:, :-1], "label": tokens[:, 1:]}
    return ReferenceRun(model, loss, features, {"batch": BATCH, "sequence": TOKENS}, sections)


def accumulated() -> ReferenceRun:
    """A transformer with accumulation, clipping and a schedule."""
    return gpt2(
        training={"gradient_accumulation_steps": 5},
        optimizer={"max_norm_clip": 0.3},
        learning_rate={"initial_lr": 0.02, "warmup_mode": "cosine", "warmup_steps": 10},
    )


def adapted() -> ReferenceRun:
    """Low-rank adapters of a transformer, the rest frozen."""
    return gpt2(adapter={"rank": 2}, learning_rate={"initial_lr": 0.02})


def bert(**sections: Mapping[str, Any]) -> ReferenceRun:
    features = {
        "input1": draw((TOKENS,), 40),
        "input2": draw((TOKENS,), 2),
        "input3": np.ones((SAMPLES, TOKENS), np.int64),
        "masked_lm_positions": draw((3,), TOKENS),
        "masked_lm_ids": draw((3,), 30) * (draw((3,), 29) > 9),
        "next_sentence_labels": draw((), 2),
    }
    sizes = {"batch": BATCH, "sequence": TOKENS, "masked": 3}
    return ReferenceRun(create_model("bert", size="tiny", **SMALL), {"type": "bert"}, features, sizes, sections)


def mnist(**sections: Mapping[str, Any]) -> ReferenceRun:
    model = create_model("mnist", variant="conv", image_size=12, hidden=16, dropout=0.0)
    # Images of seed 0 have a value at a kink: nudged by one rounding, losses of `onward train` itself move by 3e-4.
    images = np.random.default_rng(2).random((SAMPLES, 1, 12, 12), np.float32)
    loss = {"type": "softmax_cross_entropy", "prediction": "predictions", "label": "label"}
    return ReferenceRun(model, loss, {"X": images, "label": draw((), 10)}, {"batch": BATCH}, sections)


_NORMALIZED = """<ir_version: 8, opset_import: ["": 17]> g (float[batch, 1, 12, 12] X) => (float[batch, 10] logits) {
    conv = Conv<kernel_shape=[3, 3], strides=[2, 2]>(X, W)
    normal, mean_new, var_new = BatchNormalization<training_mode=1, momentum=0.9>(conv, scale, shift, mean, var)
    active = Relu(normal)
    flat = Flatten(active)
    DROPOUT
    logits = Gemm(kept, V, b)
}"""


def normalized(dropout: float = 0.0) -> ReferenceRun:
    """A convolutional network with batch normalization and, where it is asked for, dropout."""
    line = "kept = Identity(flat)" if not dropout else "kept, mask = Dropout(flat, ratio, on)"
    model = onnx.parser.parse_model(_NORMALIZED.replace("DROPOUT", line))
    random = np.random.default_rng(3)
    tensors = {
        "W": random.normal(0, 0.4, (6, 1, 3, 3)), "scale": np.ones(6), "shift": np.zeros(6), "mean": np.zeros(6),
        "var": np.ones(6), "V": random.normal(0, 0.1, (150, 10)), "b": np.zeros(10),
    }  # fmt: skip
    if dropout:
        tensors["ratio"] = np.array(dropout)
    for name, array in tensors.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    if dropout:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "on"))
    images = random.random((SAMPLES, 1, 12, 12), np.float32)
    loss = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"}
    return ReferenceRun(ir.from_proto(model), loss, {"X": images, "label": draw((), 10)}, {"batch": BATCH})


RUNS: dict[str, Callable[[], ReferenceRun]] = {
    "gpt2": gpt2,
    "accumulated": accumulated,
    "adapted": adapted,
    "bert": bert,
    "mnist": mnist,
    "mnist_averaged": lambda: mnist(optimizer={"training_optimizer_name": "AdamWScheduleFree"}),
    "normalized": normalized,
}
