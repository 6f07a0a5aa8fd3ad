"""One way of training one architecture, in its own process, which `benchmarks.census` forks.

"eager" comes first: it finds the batch size, and writes batches and the ONNX file that "onward" trains.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.lowering.architecture import Architecture
from torch import Tensor, nn

from benchmarks import census_networks as networks
from benchmarks.compare_contestants import ADAMW, Step, peak_of_tensors, train_with_onward, write_profile
from benchmarks.compare_protocol import reset_peak, resident_bytes, say, serve

RATE, CLIP, BATCHES, THREADS = 1e-4, 1.0, 2, 1
COMPILES: dict[str, bool | str] = {"onward": "auto", "onward compiled": True, "onward uncompiled": False}
AIM_SECONDS, SHORTEST, LONGEST = 0.05, 0.025, 0.15
LARGEST_BATCH = 65536
Batch = tuple[tuple[Tensor, ...], Tensor]


def make_by_hand(one: Architecture, module: nn.Module, batches: list[Batch], is_compiled: bool) -> Step:
    """A plain training loop."""
    weights = list(module.parameters())
    optimizer = torch.optim.AdamW(weights, RATE, (0.9, 0.999), 1e-8, 0.01, fused=True)

    def compute_loss(inputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        return networks.loss_by_hand(one, module(*inputs), labels)

    compute = torch.compile(compute_loss) if is_compiled else compute_loss

    def step(number: int) -> float:
        loss = compute(*batches[number % len(batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def draw_batches(one: Architecture, module: nn.Module, batch: int) -> list[Batch]:
    """Inputs and labels of every batch."""
    batches = []
    for seed in range(BATCHES):
        inputs = networks.draw_inputs(one, batch, 2 * seed)
        with torch.no_grad():
            outputs = module(*inputs)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        batches.append((inputs, networks.draw_labels(one, first, 2 * seed + 1)))
    return batches


def find_batch(one: Architecture) -> int:
    """The batch whose eager update takes about `AIM_SECONDS` of CPU time, in steps of at most 16 times."""
    batch = one.inputs[0].shape[0]
    for _ in range(4):
        module = networks.build(one)
        step = make_by_hand(one, module, draw_batches(one, module, batch), False)
        step(0)
        taken = min(_cpu_seconds(step) for _ in range(2))
        if (taken >= SHORTEST and (taken <= LONGEST or batch <= 2)) or batch >= LARGEST_BATCH:
            break
        batch = min(max(2, round(batch * min(16.0, AIM_SECONDS / taken) / 2) * 2), LARGEST_BATCH)
    return batch


def _cpu_seconds(step: Step) -> float:
    started = time.process_time()
    step(1)
    return time.process_time() - started


def prepare(one: Architecture, folder: Path) -> None:
    """Writes the batch size, batches and the ONNX file, where they are not there yet."""
    path = folder / "work.json"
    if (folder / "batches.npz").exists():
        return
    batch = json.loads(path.read_text())["batch"] if path.exists() else find_batch(one)
    module = networks.build(one)
    batches = draw_batches(one, networks.build(one), batch)
    program = networks.export(one, module, batch)
    program.save(folder / "model.onnx", external_data=True)
    names = [value.name for value in program.model.graph.inputs]
    arrays = {name: torch.cat([inputs[i] for inputs, _ in batches]).numpy() for i, name in enumerate(names)}
    np.savez(folder / "batches.npz", **arrays, labels=torch.cat([labels for _, labels in batches]).numpy())  # type: ignore[arg-type]
    work = {
        "batch": batch,
        "weights": sum(p.numel() for p in module.parameters()),
        "nodes": len(list(program.model.graph.all_nodes())),
        "prediction": program.model.graph.outputs[0].name,
        "rank": batches[0][1].dim() + networks.has_classes(one),
    }
    path.write_text(json.dumps(work))


def make_onward(one: Architecture, folder: Path, compiles: bool | str) -> Step:
    """onward with its defaults but `speed.compile`, from the ONNX file on."""
    work = json.loads((folder / "work.json").read_text())
    fields: dict[str, dict[str, Any]] = {
        "paths": {"model_path": folder / "model.onnx"},
        "loss": networks.loss_fields(one, work["prediction"], work["rank"]),
        "training": {"batch_size": work["batch"], "num_train_steps": 1_000_000},
        "learning_rate": {"initial_lr": RATE},
        "speed": {"compile": compiles},
        "optimizer": {"training_optimizer_name": "AdamW", "optimizer_attributes": [ADAMW]},
    }
    with np.load(folder / "batches.npz") as stored:
        data = {name: stored[name] for name in stored.files}
    return train_with_onward(fields, data, "cpu", THREADS, CLIP)


def make_step(way: str, one: Architecture, folder: Path) -> Step:
    """The way's update."""
    if way in COMPILES:
        return make_onward(one, folder, COMPILES[way])
    if way == "eager":
        prepare(one, folder)
    batch = json.loads((folder / "work.json").read_text())["batch"]
    batches = draw_batches(one, networks.build(one), batch)
    return make_by_hand(one, networks.build(one), batches, way == "compiled")


def run(way: str, name: str, folder: Path) -> None:
    """Trains when told to, until told to end."""
    torch.set_num_threads(THREADS)
    one = networks.enlarged(name)
    baseline = resident_bytes("VmRSS")
    reset_peak()
    try:
        step = make_step(way, one, folder)
    except Exception as error:
        said = str(error).strip().splitlines()
        say({"failure": f"{type(error).__name__}: {said[0][:200] if said else ''}"})
        raise

    def memory(update: Callable[[], float]) -> int:
        found = peak_of_tensors("cpu", update)
        write_profile("cpu", update, folder / f"{way}.profile")
        return found

    serve(step, memory, baseline)
