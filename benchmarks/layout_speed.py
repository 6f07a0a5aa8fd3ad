"""What choosing a layout takes: `python -m benchmarks.layout_speed [NETWORK ...] [--profile FILE]`.

A GPT-2 on 8 ranks, and a Llama of 70 billion parameters, whose data file is a hole as large as they are, on 16,384
ranks: `onward plan RUN.yaml --ranks N --gpu h100` in a process of its own. Printed are CPU seconds, the peak of its
memory, and the layout that was chosen.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import yaml

from benchmarks.quantized_base import Llama, build
from onward.models import create_model

LLAMA_70B = Llama(layers=80, width=8192, heads=64, key_heads=8, inner=28672, vocabulary=128256)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network and the run that is asked for.

    Attributes:
        model: makes it.
        tokens: of a sample.
        samples: of an update.
        ranks: of the run.
        wanted: CPU seconds, at most.
    """

    model: Callable[[], ir.Model]
    tokens: int
    samples: int
    ranks: int
    wanted: float


CASES: Mapping[str, Case] = {
    "gpt2": Case(
        model=lambda: create_model("gpt2", size="small", dropout=0.0), tokens=1024, samples=64, ranks=8, wanted=10.0
    ),
    "llama_70b": Case(model=lambda: build(LLAMA_70B, 4096), tokens=4096, samples=16384, ranks=16384, wanted=60.0),
}

_GIVEN_BYTES = 256

MEASURE = """
import json, resource, sys
from onward.cli import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
found = {"code": code, "bytes": used.ru_maxrss * 1024, "seconds": used.ru_utime + used.ru_stime}
print(json.dumps(found))
"""


def save_without_weights(model: ir.Model, path: Path) -> None:
    """Large initializers are stored in a file of holes, which take no space; only their first and last numbers are
    given, which tell weights from masks and from copies of each other."""
    data, offset, random = path.with_name(path.name + ".data"), 0, np.random.default_rng(0)
    ends: list[int] = []
    for name, value in model.graph.initializers.items():
        stored = value.const_value
        assert stored is not None
        if stored.nbytes < 2**20 or name.endswith("_cache"):
            value.const_value = ir.Tensor(np.asarray(stored.numpy()), name=name)
            continue
        value.const_value = ir.ExternalTensor(
            data.name,
            offset,
            stored.nbytes,
            stored.dtype,
            shape=ir.Shape(stored.shape.numpy()),
            name=name,
            base_dir=path.parent,
        )
        ends += [offset, offset + stored.nbytes - _GIVEN_BYTES]
        offset += (stored.nbytes + 4095) // 4096 * 4096
    with data.open("wb") as file:
        file.truncate(offset)
        for place in ends:
            file.seek(place)
            file.write(random.standard_normal(_GIVEN_BYTES // 4, dtype=np.float32).tobytes())
    ir.save(model, path)


def write_run(case: Case, folder: Path) -> Path:
    """The model and its RUN.yaml, in a folder."""
    save_without_weights(case.model(), folder / "model.onnx")
    run: dict[str, Any] = {
        "paths": {"model_path": "model.onnx"},
        "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
        "training": {
            "batch_size": case.samples,
            "num_train_steps": 1000,
            "mapped_dimensions": {"sequence": case.tokens},
        },
        "learning_rate": {"initial_lr": 1.0e-4},
        "optimizer": {"training_optimizer_name": "AdamW"},
        "mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("networks", nargs="*", metavar="NETWORK", help=", ".join(CASES))
    arguments.add_argument("--profile", type=Path, help="write what cProfile finds there")
    asked = arguments.parse_args()
    for name in asked.networks or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            run = write_run(case, Path(folder))
            profiled = ["-m", "cProfile", "-o", str(asked.profile)] if asked.profile else []
            script = Path(folder) / "measure.py"
            script.write_text(MEASURE)
            options = ["plan", str(run), "--ranks", str(case.ranks), "--gpu", "h100", "--nodes-of", "8"]
            command = [sys.executable, *profiled, str(script), *options]
            output = subprocess.run(command, capture_output=True, text=True, check=False)
        *lines, last = output.stdout.splitlines() or [""]
        print("\n".join(lines), output.stderr[-4000:], sep="\n")
        found = json.loads(last)
        print(
            f"{name} on {case.ranks:,} ranks: {found['seconds']:.0f} CPU s ({case.wanted:.0f} wanted), "
            f"{found['bytes'] / 1e9:.2f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
