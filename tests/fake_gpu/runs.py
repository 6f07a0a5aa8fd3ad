"""Whole runs on a CPU and on the fake GPU: their losses and metrics, and for what the host waited in between."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.reports import StepReport
from onward.environment import Environment
from onward.models import create_model
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.fake_gpu.tensors import SEEN, WAITS, GpuTensor, fake_gpu
from tests.graph.exported import export
from tests.watching import Recorder

SAMPLES, BATCH, TOKENS, WORDS = 16, 2, 8, 64
CROSS_ENTROPY = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"}
BF16 = {"use_mixed_precision": True, "use_bfloat16": True}
FP16 = {"use_mixed_precision": True, "use_bfloat16": False, "loss_scale": 0.0}
ADAMW = {"training_optimizer_name": "AdamW", "max_norm_clip": 0.5}
MOMENTUM = {
    "training_optimizer_name": "SGDOptimizer",
    "optimizer_attributes": [{"weights": "*", "momentum": 0.9}],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A network, its data, and the sections of its run."""

    model: Callable[[Path], None]
    features: Mapping[str, np.ndarray]
    sections: Mapping[str, Any]
    resumes: bool = False


class AfterTheFirst(Recorder):
    """Counts what the host waits for from the first report on: what comes before is looked at once."""

    def on_step(self, report: StepReport) -> None:
        """Forgets what was before."""
        if not self.steps:
            WAITS.take()
        super().on_step(report)


class Recurrent(nn.Module):
    """An embedding and an LSTM in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.classes = nn.Linear(16, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.classes(self.lstm(self.words(input_ids))[0])


def created(name: str, **options: Any) -> Callable[[Path], None]:
    """A reference model."""
    return lambda path: ir.save(create_model(name, **options), path)


def recurrent(path: Path) -> None:
    """The recurrent network, exported with an open batch."""
    torch.manual_seed(0)
    inputs = (torch.from_numpy(tokens()["input_ids"])[:BATCH],)
    names = {"input_names": ["input_ids"], "output_names": ["logits"], "dynamic_axes": {"input_ids": {0: "batch"}}}
    export(Recurrent(), inputs, path, 17, False, **names)


def tokens() -> dict[str, np.ndarray]:
    """Sequences, and what comes next."""
    words = np.random.default_rng(0).integers(0, WORDS, (SAMPLES, TOKENS + 1))
    return {"input_ids": words[:, :-1].copy(), "labels": words[:, 1:].copy()}


def images() -> dict[str, np.ndarray]:
    """Noise in five classes."""
    generator = np.random.default_rng(0)
    return {
        "images": generator.standard_normal((SAMPLES, 3, 16, 16)).astype(np.float32),
        "labels": generator.integers(0, 5, SAMPLES),
    }


def sentences() -> dict[str, np.ndarray]:
    """What BERT reads, a third of the tokens masked."""
    generator = np.random.default_rng(0)
    shape = (SAMPLES, TOKENS)
    chosen = generator.random(shape) < 0.3
    return {
        "input1": generator.integers(0, WORDS, shape),
        "input2": generator.integers(0, 2, shape),
        "input3": np.ones(shape, np.int64),
        "labels": np.where(chosen, generator.integers(0, WORDS, shape), -100),
    }


def gpt2(**options: Any) -> Callable[[Path], None]:
    """GPT-2 of two layers; dropout would draw other numbers where attention is computed otherwise."""
    small = {"size": "tiny", "layers": 2, "heads": 2, "width": 32, "vocab_size": WORDS, "context_length": TOKENS}
    return created("gpt2", **{**small, "dropout": 0.0, **options})


BERT = created("bert", size="tiny", heads=2, width=32, vocab_size=WORDS, context_length=TOKENS, dropout=0.0)
SQUEEZENET = created("squeezenet", image_size=16, classes=5, dropout=0.0, batch_norm=True)
MASKED = {"type": "softmax_cross_entropy", "prediction": "output1", "label": "labels", "ignore_index": -100}

CASES: dict[str, Case] = {
    "GPT-2, AdamW, clipping": Case(gpt2(), tokens(), {"optimizer": ADAMW}),
    "GPT-2, bf16, accumulation": Case(
        gpt2(),
        tokens(),
        {"optimizer": ADAMW, "mixed_precision": BF16, "training": {"gradient_accumulation_steps": 2}},
    ),
    "GPT-2, fp16": Case(gpt2(), tokens(), {"optimizer": ADAMW, "mixed_precision": FP16}),
    "GPT-2, float8": Case(gpt2(), tokens(), {"optimizer": ADAMW, "mixed_precision": {**BF16, "float8": True}}),
    "GPT-2, recomputed and resumed": Case(
        gpt2(),
        tokens(),
        {"optimizer": ADAMW, "recompute": {"segments": True}, "training": {"display_loss_steps": 2}},
        resumes=True,
    ),
    "BERT, LAMB": Case(BERT, sentences(), {"optimizer": {"training_optimizer_name": "Lamb"}, "loss": MASKED}),
    "SqueezeNet, momentum, bf16": Case(SQUEEZENET, images(), {"optimizer": MOMENTUM, "mixed_precision": BF16}),
    "LSTM, AdamW": Case(recurrent, tokens(), {"optimizer": ADAMW}),
}


def run(case: Case, kind: str, folder: Path, compiled: bool | Literal["auto"] = False) -> dict[str, Any]:
    """Trains eight updates with a report after the first, the fourth and the last, and evaluates at the end."""
    case.model(folder / "model.onnx")
    sections = {
        "paths": {"model_path": folder / "model.onnx", "output_dir": folder / kind},
        "loss": CROSS_ENTROPY,
        "learning_rate": {"initial_lr": 1e-3},
        **case.sections,
        "speed": {"compile": compiled, **case.sections.get("speed", {})},
    }
    wanted = case.sections.get("training", {})
    steps = 8 * wanted.get("gradient_accumulation_steps", 1)
    sections["training"] = {"batch_size": BATCH, "num_train_steps": steps, "display_loss_steps": 4, **wanted}
    if case.resumes:
        sections["checkpoint"] = {"checkpoints_dir": folder / f"{kind} checkpoints", "checkpoint_period": 4}
    loader, reports = InMemoryDataLoader(case.features), list[StepReport]()
    for end in (steps // 2, steps) if case.resumes else (steps,):
        sections["training"]["num_train_steps"] = end
        recorder = AfterTheFirst()
        environment = Environment(execution_provider=kind, threads=1)  # type: ignore[arg-type]
        runner = TrainingRunner(Parameters.from_mapping(sections), environment, [recorder], progress=False)
        runner.initialize()
        runner.run(loader)
        waits = WAITS.take()
        reports += recorder.steps
    report = runner.end_training(loader)
    weights = runner.net.tensors_by_name().values()
    return {
        "losses": [report.loss for report in reports],
        "norms": [report.gradient_norm for report in reports],
        "metrics": None if report is None else dict(report.metrics),
        "waits": dict(Counter(f"{what} at {place}" for what, place in waits)),
        "on_gpu": all(isinstance(tensor, GpuTensor) for tensor in weights),
        "resumed": runner.resumed_update,
    }


def run_all(names: list[str]) -> dict[str, Any]:
    """Case -> what it was on a CPU and on the GPU."""
    found: dict[str, Any] = {}
    for name in names or list(CASES):
        with tempfile.TemporaryDirectory() as folder:
            on_cpu = run(CASES[name], "CPU", Path(folder))
            SEEN.clear()
            with fake_gpu():
                on_gpu = run(CASES[name], "CUDA", Path(folder))
            found[name] = {"CPU": on_cpu, "CUDA": on_gpu, "operators": sorted(SEEN)}
    return found
