"""Time from `onward init` to the first step of `onward train`: `python -m benchmarks.init_to_step`.

Five files and their data are made here (a classifier, a regressor, a language model, a network for images, one for a
table), then the two commands run as a user would type them, each in its own process. Seconds are on the clock;
the processor's seconds of both processes are next to them, since what else runs on the machine counts not in these.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from onward.models import create_model

SAMPLES = 512


@dataclass(frozen=True)
class Found:
    """Seconds of one kind of model.

    Attributes:
        name: of the kind.
        init, first_line, first_step: of `onward init`, and from the start of `onward train` to its first line and to
            the line of its first step.
        computed: seconds of the processor, of both commands.
        command: what was typed after `onward`.
    """

    name: str
    init: float
    first_line: float
    first_step: float
    computed: float
    command: str

    @property
    def total(self) -> float:
        """From the start of `onward init` to the first step."""
        return self.init + self.first_step


def _export(module: nn.Module, example: torch.Tensor, path: Path) -> None:
    batch = torch.export.Dim.DYNAMIC
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"]}
    torch.onnx.export(
        module.eval(), (example,), path, dynamo=True, dynamic_shapes=({0: batch},), verbose=False, **names
    )


def make_classifier(folder: Path) -> list[str]:
    """Vectors to ten classes, from a .npz."""
    torch.manual_seed(0)
    _export(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10)), torch.zeros(4, 32), folder / "m.onnx")
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, 32)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, label=random.integers(0, 10, SAMPLES))
    return ["m.onnx", "data.npz"]


def make_regressor(folder: Path) -> list[str]:
    """Vectors to one number, from a .npz."""
    torch.manual_seed(0)
    _export(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 1)), torch.zeros(4, 32), folder / "m.onnx")
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, 32)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, target=x.sum(1))
    return ["m.onnx", "data.npz"]


def make_language_model(folder: Path) -> list[str]:
    """A small GPT-2 of bytes, from a text file."""
    options = {"layers": 4, "heads": 4, "width": 128, "context_length": 64, "vocab_size": 256}
    ir.save(create_model("gpt2", size="tiny", **options), folder / "m.onnx")
    words = np.random.default_rng(0).choice(["the", "ship", "sails", "home", "and", "rests", "there"], 40_000)
    (folder / "text.txt").write_text(" ".join(words.tolist()))
    return ["m.onnx", "text.txt", "--tokenizer", "bytes", "--sequence-length", "64"]


def make_images(folder: Path) -> list[str]:
    """SqueezeNet for small pictures, from one folder a class."""
    from PIL import Image

    ir.save(create_model("squeezenet", classes=4, image_size=64), folder / "m.onnx")
    random = np.random.default_rng(0)
    for number in range(128):
        place = folder / "pictures" / f"class{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return ["m.onnx", "pictures"]


def make_table(folder: Path) -> list[str]:
    """Columns of a CSV to two classes."""
    torch.manual_seed(0)
    _export(nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 2)), torch.zeros(4, 5), folder / "m.onnx")
    rows = np.random.default_rng(0).standard_normal((SAMPLES, 5))
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "height", "weight", "income", "distance", "bought"])
        writer.writerows([*map("{:.4f}".format, row), "yes" if row.sum() > 0 else "no"] for row in rows)
    return ["m.onnx", "table.csv", "--label", "bought"]


KINDS: dict[str, Callable[[Path], list[str]]] = {
    "classifier": make_classifier,
    "regressor": make_regressor,
    "language model": make_language_model,
    "images": make_images,
    "table": make_table,
}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(name: str) -> Found:
    """Runs the two commands."""
    onward = [sys.executable, "-u", "-m", "onward"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        given = KINDS[name](folder)
        before, started = _cpu_seconds(), time.perf_counter()
        subprocess.run([*onward, "init", *given], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        init, first_line, first_step = time.perf_counter() - started, 0.0, 0.0
        started = time.perf_counter()
        command = [*onward, "train", "run.yaml", "--training.display_loss_steps=1"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                seconds = time.perf_counter() - started
                first_line = first_line or seconds
                if line.startswith("train "):
                    first_step = seconds
                    process.kill()
                    break
        if not first_step:
            raise SystemExit(f"{name}: training ended without a step")
        return Found(name, init, first_line, first_step, _cpu_seconds() - before, f"init {shlex.join(given)}")


def table(found: list[Found]) -> str:
    """The results in Markdown."""
    lines = [
        "| kind | `onward` | `init` | `train`: first line | first step | `init` to first step | computed |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.name} | `{one.command}` | {one.init:.1f} s | {one.first_line:.1f} s | {one.first_step:.1f} s | "
        f"{one.total:.1f} s | {one.computed:.1f} s |"
        for one in found
    ]
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the table, and writes the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--out", type=Path, help="a .json for the numbers")
    options = parser.parse_args()
    found = [measure(name) for name in options.kinds or KINDS]
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n\n{table(found)}")
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
