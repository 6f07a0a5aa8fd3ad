"""QLoRA of a Llama of a billion random weights in little memory: `python -m benchmarks.quantized_base [--size NAME]`.

Writes the model in fp32, weight by weight; asks `onward plan` what a run takes; trains adapters for some steps on
random tokens in a process of its own, and prints its highest resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import yaml

from onward.graph.writing.model_saving import save_model
from onward.models.graph_writer import Fill, GraphWriter, constant, normal

EPSILON, STD, ROTATED = 1e-5, 0.02, 10_000.0


@dataclass(frozen=True, kw_only=True)
class Llama:
    """Sizes of a Llama."""

    layers: int
    width: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int


SIZES = {
    "1b": Llama(layers=22, width=2048, heads=32, key_heads=4, inner=5632, vocabulary=32000),  # TinyLlama's
    "tiny": Llama(layers=2, width=128, heads=4, key_heads=2, inner=256, vocabulary=512),
}


def build(size: Llama, tokens: int) -> ir.Model:
    """A Llama for sequences of up to `tokens`: `input_ids`, `position_ids` -> `logits`."""
    writer = GraphWriter("llama", 23, 0)
    ids = writer.input("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    places = writer.input("position_ids", ir.DataType.INT64, ["batch", "sequence"])
    features = size.width // size.heads
    angles = np.outer(np.arange(tokens), ROTATED ** (-np.arange(0, features, 2) / features)).astype(np.float32)
    tables = [
        writer.weight(name, angles.shape, _given(function(angles)))
        for name, function in (("cos_cache", np.cos), ("sin_cache", np.sin))
    ]
    x = writer.op("Gather", writer.weight("model.embed_tokens.weight", (size.vocabulary, size.width), normal(STD)), ids)
    for layer in range(size.layers):
        with writer.scope(f"model.layers.{layer}"):
            x = writer.op("Add", x, _attention(writer, size, _norm(writer, x, "input_layernorm", size), tables, places))
            x = writer.op("Add", x, _gated(writer, size, _norm(writer, x, "post_attention_layernorm", size)))
    x = _norm(writer, x, "model.norm", size)
    with writer.scope("lm_head"):
        head = writer.weight("weight", (size.vocabulary, size.width), normal(STD))
        logits = writer.op("MatMul", x, writer.op("Transpose", head, perm=[1, 0]), name="logits")
    return writer.finish([(logits, ["batch", "sequence", size.vocabulary])])


def _given(array: np.ndarray) -> Fill:
    return lambda generator, shape: array


def _linear(writer: GraphWriter, x: ir.Value, name: str, inputs: int, outputs: int) -> ir.Value:
    with writer.scope(name):
        weight = writer.weight("weight", (outputs, inputs), normal(STD))
        return writer.op("MatMul", x, writer.op("Transpose", weight, perm=[1, 0]))


def _norm(writer: GraphWriter, x: ir.Value, name: str, size: Llama) -> ir.Value:
    with writer.scope(name):
        scale = writer.weight("weight", (size.width,), constant(1.0))
        return writer.op("RMSNormalization", x, scale, axis=-1, epsilon=EPSILON)


def _attention(writer: GraphWriter, size: Llama, x: ir.Value, tables: list[ir.Value], places: ir.Value) -> ir.Value:
    narrow = size.width // size.heads * size.key_heads
    with writer.scope("self_attn"):
        query, key = (
            writer.op("RotaryEmbedding", _linear(writer, x, name, size.width, width), *tables, places, num_heads=heads)
            for name, width, heads in (("q_proj", size.width, size.heads), ("k_proj", narrow, size.key_heads))
        )
        value = _linear(writer, x, "v_proj", size.width, narrow)
        mixed = writer.op(
            "Attention", query, key, value, is_causal=1, q_num_heads=size.heads, kv_num_heads=size.key_heads
        )
        return _linear(writer, mixed, "o_proj", size.width, size.width)


def _gated(writer: GraphWriter, size: Llama, x: ir.Value) -> ir.Value:
    with writer.scope("mlp"):
        gate, up = (_linear(writer, x, name, size.width, size.inner) for name in ("gate_proj", "up_proj"))
        swish = writer.op("Mul", gate, writer.op("Sigmoid", gate))
        return _linear(writer, writer.op("Mul", swish, up), "down_proj", size.inner, size.width)


def run_file(folder: Path, dtype: str, tokens: int, steps: int) -> Path:
    """The RUN.yaml of a run, in a folder."""
    path = folder / f"{dtype}.yaml"
    run = {
        "paths": {"model_path": "llama.onnx"},
        "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
        "training": {
            "batch_size": 1,
            "num_train_steps": steps,
            "display_loss_steps": 1,
            "is_perf_test": True,
            "mapped_dimensions": {"sequence": tokens},
        },
        "learning_rate": {"initial_lr": 1.0e-4},
        "adapter": {"rank": 8, "alpha": 16},
        "frozen_weights": {"dtype": dtype},
        "machine": {"execution_provider": "CPU"},
    }
    path.write_text(yaml.safe_dump(run))
    return path


MEASURE = """
import json, resource, sys, time
from onward.cli import main
started = time.perf_counter()
code = main(["train", sys.argv[1]])
used = resource.getrusage(resource.RUSAGE_SELF)
seconds = time.perf_counter() - started
cpu = used.ru_utime + used.ru_stime
print(json.dumps({"code": code, "peak": used.ru_maxrss * 1024, "seconds": seconds, "cpu": cpu}))
"""


def main() -> None:
    """Prints what the run takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="1b", choices=SIZES)
    parser.add_argument("--dtype", default="nf4", choices=("as_stored", "bf16", "int8", "int4", "nf4"))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the model is written, or found; absent: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "llama.onnx"
        if not model.exists():
            started = time.perf_counter()
            save_model(build(SIZES[arguments.size], arguments.tokens), model, external=True)
            print(f"model written in {time.perf_counter() - started:.0f} s", flush=True)
        gigabytes = sum(file.stat().st_size for file in folder.glob("llama.onnx*")) / 1e9
        print(f"model: {gigabytes:.2f} GB; load of the machine: {os.getloadavg()[0]:.1f}", flush=True)
        run = run_file(folder, arguments.dtype, arguments.tokens, arguments.steps)
        command = [sys.executable, "-m", "onward", "plan", str(run)]
        plan = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = plan.splitlines()
        start = next(place for place, line in enumerate(lines) if "frozen weights" in line)
        print("\n".join(lines[start : start + 2]), flush=True)
        command = [sys.executable, "-c", MEASURE, str(run)]
        output = subprocess.run(command, capture_output=True, text=True, check=False)
        print(output.stdout[: output.stdout.rfind("{")], output.stderr, sep="\n")
        found = json.loads(output.stdout.splitlines()[-1])
        print(
            f"{arguments.dtype}, {arguments.tokens} tokens: exit code {found['code']}, peak {found['peak'] / 1e9:.2f} "
            f"GB resident, {found['seconds']:.0f} s in all ({found['cpu']:.0f} s of CPU time)"
        )


if __name__ == "__main__":
    main()
