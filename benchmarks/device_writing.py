"""How long device bundles of a GPT-2 take to write, and how large they are: `python -m benchmarks.device_writing`.

A GPT-2 of torch's exporter with 2 layers and one with 12, fresh weights, a vocabulary of 50,257. Times are CPU time
of `onward device` in a process of its own with one thread, imports included; ratios are of files to `weights.bin`,
which holds every weight once.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """\
paths: {model_path: model.onnx}
loss: {type: softmax_cross_entropy, prediction: logits, label: labels}
optimizer: {training_optimizer_name: AdamW, max_norm_clip: 1.0}
learning_rate: {initial_lr: 0.0003}
training: {batch_size: 2, num_train_steps: 1000}
"""


def export(folder: Path, layers: int, width: int) -> None:
    """The network as ONNX, batch and sequence open, and a RUN.yaml."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=max(1, width // 64),
        use_cache=False,
        attn_pdrop=0,
        embd_pdrop=0,
        resid_pdrop=0,
    )

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = GPT2LMHeadModel(config)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.network(input_ids).logits

    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=1024)}
    torch.onnx.export(
        Logits().eval(),
        (torch.randint(0, config.vocab_size, (2, 64)),),
        folder / "model.onnx",
        dynamo=True,
        input_names=["input_ids"],
        output_names=["logits"],
        dynamic_shapes=(sizes,),
        external_data=True,
        verbose=False,
    )
    (folder / "run.yaml").write_text(RUN)


def write(folder: Path) -> float:
    """CPU seconds of writing the bundle."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "onward", "device", "run.yaml", "-o", "bundle"]
    shutil.rmtree(folder / "bundle", ignore_errors=True)
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=one_thread)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 12])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(
        f"| GPT-2, {options.width} wide | CPU seconds | of the first | weights.bin | all files | ratio |\n"
        + "|---" * 6
        + "|"
    )
    with tempfile.TemporaryDirectory() as name:
        folders = {layers: Path(name) / str(layers) for layers in options.layers}
        for layers, folder in folders.items():
            folder.mkdir()
            export(folder, layers, options.width)
        seconds = [{layers: write(folder) for layers, folder in folders.items()} for _ in range(options.rounds)]
        for layers, folder in folders.items():
            found = statistics.median(one[layers] for one in seconds)
            ratio = statistics.median(one[layers] / one[options.layers[0]] for one in seconds)
            sizes = {path.name: path.stat().st_size for path in (folder / "bundle").iterdir()}
            weights, total = sizes["weights.bin"], sum(sizes.values())
            cells = [
                f"{layers} layers",
                f"{found:.1f}",
                f"{ratio:.2f}",
                f"{weights / 1e6:.1f} MB",
                f"{total / 1e6:.1f} MB",
            ]
            print(f"| {' | '.join(cells)} | {total / weights:.3f} |")


if __name__ == "__main__":
    main()
