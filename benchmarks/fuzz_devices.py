"""Random networks as bundles and in `onward train`: `python -m benchmarks.fuzz_devices [--cases 100] [--seed 0]`.

Odd seeds are networks of sequences, even ones of images. Optimizer, schedule, clipping, accumulation, batch size,
frozen layers and the form of the files are drawn, too. A bundle's losses, weights and running statistics after some
updates must be those of `onward train` in float64, within a bound or 20 times as far as `onward train` in float32. A
state that is saved and loaded in between must continue bit for bit, and the exported file must predict what the
trainer does, for another batch size. Whatever is not so is printed with its seed and makes the exit code 1.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import yaml
from tests.invariants.random_networks import draw_images, image_data
from tests.invariants.random_sequences import CLASSES, draw_sequences, sequence_data
from tests.mlp import ON_ONE_THREAD
from tests.watching import Recorder

from benchmarks.fuzz import seeds_asked_for
from onward.data.in_memory import InMemoryDataLoader
from onward.device.bundle import write_bundle
from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from onward_device import Trainer

BOUND = 1e-4
UPDATES = 4
OPTIMIZERS = ("SGDOptimizer", "AdamW", "Adam", "Lion", "Adafactor", "Lamb", "torch.optim.RMSprop", "torch.optim.NAdam")
DECAYS = ("constant", "linear", "cosine")
LARGEST_LOSS = 100.0
"""A network beyond it diverges, and would only magnify rounding."""
Tensors = dict[str, np.ndarray]


def run_of(source: random.Random, rate: float, weights: list[str]) -> dict[str, Any]:
    """Sections of a run."""
    accumulation = source.choice((1, 1, 2, 3))
    name = source.choice(OPTIMIZERS)
    training: dict[str, Any] = {
        "batch_size": source.choice((1, 3, 4)),
        "gradient_accumulation_steps": accumulation,
        "num_train_steps": UPDATES * accumulation,
        "display_loss_steps": 1,
        "weights_to_train": ["w*"],
    }
    if source.random() < 0.3:
        training["weights_not_to_train"] = sorted(source.sample(weights, len(weights) // 2))
    return {
        "paths": {"model_path": "model.onnx"},
        "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
        "optimizer": {"training_optimizer_name": name, "max_norm_clip": source.choice((None, 0.5, 5.0))},
        "learning_rate": {
            "initial_lr": rate * (1.0 if name == "SGDOptimizer" else 0.1),
            "warmup_mode": source.choice(DECAYS),
            "warmup_steps": source.choice((0, 2)),
        },
        "training": training,
    }


def train(folder: Path, data: Mapping[str, np.ndarray]) -> tuple[list[float], Tensors]:
    """By `onward train`: losses of updates, weights and running statistics."""
    recorder = Recorder()
    runner = TrainingRunner(Parameters.load(folder / "run.yaml"), ON_ONE_THREAD, [recorder], progress=False)
    runner.initialize()
    runner.run(InMemoryDataLoader(dict(data)))
    tensors = runner.net.tensors_by_name()
    names = [*runner.net.weights, *runner.net.graph.states]
    return recorder.losses, {name: tensors[name].detach().numpy().astype(np.float64) for name in names}


def train_on_device(
    folder: Path, bundle: Path, run: Mapping[str, Any], data: Mapping[str, np.ndarray]
) -> tuple[list[float], Tensors, list[str]]:
    """By the bundle: losses of updates, its state, and what is wrong with saving and exporting."""
    batch, accumulation = run["training"]["batch_size"], run["training"]["gradient_accumulation_steps"]
    trainer, other, losses, wrong = Trainer.load(bundle), Trainer.load(bundle), [], []
    for step in range(UPDATES * accumulation):
        given = {name: array[step * batch : (step + 1) * batch] for name, array in data.items()}
        losses.append(trainer.train_step(given))
        if step == UPDATES * accumulation // 2:
            trainer.save_state(folder / "state.safetensors")
            other.load_state(folder / "state.safetensors")
        elif step > UPDATES * accumulation // 2:
            other.train_step(given)
    state, again = trainer.state(), other.state()
    wrong += [f"{n} continues with other bits" for n in state if state[n].tobytes() != again[n].tobytes()]
    trainer.export(folder / "exported.onnx")
    session = onnxruntime.InferenceSession(folder / "exported.onnx")
    inputs = {one.name: data[one.name][:5] for one in session.get_inputs()}
    found = session.run(None, inputs)
    for (name, mine), theirs in zip(trainer.predict(inputs).items(), found, strict=True):
        if not np.allclose(mine, theirs, 1e-5, 1e-6, equal_nan=True):
            wrong.append(f"exported, {name} is {np.abs(mine - theirs).max():.1e} apart")
    means = np.reshape(losses, (-1, accumulation)).mean(1)
    return [float(one) for one in means], state, wrong


def distance(losses: list[float], tensors: Mapping[str, np.ndarray], exact: tuple[list[float], Tensors]) -> float:
    """The largest difference of a loss, or of a tensor as a part of its largest element; infinite for NaN."""
    worst = [abs(one - other) / max(abs(other), 1.0) for one, other in zip(losses, exact[0], strict=True)]
    for name, tensor in exact[1].items():
        worst.append(float(np.abs(tensors[name] - tensor).max()) / max(float(np.abs(tensor).max()), 1e-2))
    return max(value if value == value else float("inf") for value in worst)


def try_one(seed: int, kind: str, shift: float = 0.0) -> list[str]:
    """What is wrong with one network; nothing, if all is well."""
    draw, data_of, rate = {
        "images": (draw_images, image_data, 0.05),
        "sequences": (draw_sequences, sequence_data, 0.002),
    }[kind]
    source = random.Random(seed)
    data = {name: array if name != "x" else array + np.float32(shift) for name, array in data_of(64).items()}
    if "ids" in data:
        data["ids"] = data["ids"] % CLASSES  # clients refuse others
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        narrow, wide = Path(name) / "float32", Path(name) / "float64"
        for folder, dtype in ((narrow, np.float32), (wide, np.float64)):
            folder.mkdir()
            model = draw(seed, dtype)
            if dtype is np.float32:
                run = run_of(source, rate, [i.name for i in model.graph.initializer if i.name.startswith("w")])
            onnx.save(model, folder / "model.onnx")
            (folder / "run.yaml").write_text(yaml.safe_dump(run))
        samples = UPDATES * run["training"]["gradient_accumulation_steps"] * run["training"]["batch_size"]
        data = {name: array[: max(samples, 5)] for name, array in data.items()}
        bundle = write_bundle(narrow / "run.yaml", narrow / "bundle", weights_inside=source.random() < 0.3)
        doubles = {name: array.astype(np.float64) if name == "x" else array for name, array in data.items()}
        exact = train(wide, doubles)
        if not max(exact[0]) < LARGEST_LOSS:
            return []
        near = distance(*train(narrow, data), exact)
        losses, state, wrong = train_on_device(narrow, bundle, run, data)
        apart = distance(losses, state, exact)
        if not (apart < BOUND or apart < 20 * near):
            wrong.append(f"{apart:.1e} from float64, onward train {near:.1e} ({run['optimizer']}, {run['training']})")
    return wrong


def main() -> int:
    torch.set_num_threads(1)
    seeds = seeds_asked_for(__doc__, 100)
    failures, started = 0, time.perf_counter()
    for seed in seeds:
        shift = 10.0 if seed % 8 == 6 else 0.0  # of images: batch normalizations of values far from zero
        try:
            wrong = try_one(seed // 2, ("images", "sequences")[seed % 2], shift)
        except ParametersError as error:  # of what was drawn: all weights that a gradient reaches are frozen
            wrong = [] if "no trainable weights" in str(error) else [str(error)]
        except Exception as error:
            wrong = [f"{type(error).__name__}: {str(error)[:300]}"]
        failures += bool(wrong)
        for text in wrong:
            print(f"seed {seed}: {text}", flush=True)
    print(f"{len(seeds):,} bundles in {time.perf_counter() - started:.0f} s: {failures} differ from onward train")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
