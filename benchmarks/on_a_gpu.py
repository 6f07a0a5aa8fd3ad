"""Two parts of `dev/on_a_gpu`: what is there (`environment`), and the batch size that is found (`batch_size`).

`python -m benchmarks.on_a_gpu environment|batch_size [--size small] [--device cuda]`
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "ml_dtypes",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "safetensors",
    "xxhash",
    "tensorboard",
    "rich",
    "protobuf",
    "pyyaml",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "transformers",
    "onnxruntime",
    "pytest",
    "hypothesis",
    "tokenizers",
    "pyarrow",
    "pillow",
    "scikit-learn",
)
SAMPLES, STEPS = 64, 8


def show_environment() -> None:
    """Prints versions, what is missing, and what the GPU says of itself."""
    print(f"python {sys.version}")
    for name in PACKAGES:
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} MISSING")
    print(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    print(f"NCCL {'there' if torch.distributed.is_nccl_available() else 'MISSING'}")
    for name in ("gcc", "g++", "nvidia-smi"):
        print(f"{name}: {shutil.which(name)}")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_properties(0), torch.cuda.mem_get_info(), torch.cuda.get_arch_list())
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"], check=False)


def find_batch_size(size: str, device: str) -> None:
    """Trains GPT-2 with the largest micro-batch that is found, in bf16, and prints forecast, memory and speed."""
    import onnx_ir as ir

    from onward.engine.building.preparation import feature_ranges
    from onward.engine.building.sizes import known_dimensions
    from onward.engine.forecast.performance import performance_lines, synthetic_loader
    from onward.environment import Environment
    from onward.models import create_model
    from onward.parameters import Parameters
    from onward.runner import TrainingRunner

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.onnx"
        ir.save(create_model("gpt2", size=size), path, external_data="gpt2.bin")
        tokens = 1024 if size != "tiny" else 128
        sections = {
            "paths": {"model_path": path},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {
                "batch_size": SAMPLES,
                "num_train_steps": STEPS,
                "display_loss_steps": 1,
                "find_batch_size": True,
                "mapped_dimensions": {"sequence": tokens},
                "skip_evaluation": True,
            },
            "learning_rate": {"initial_lr": 1e-4},
            "optimizer": {"training_optimizer_name": "AdamW"},
            "mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True},
            "machine": {"memory_gb": 0.5} if device == "cpu" else {},
        }
        parameters = Parameters.from_mapping(sections)
        environment = Environment(execution_provider="CUDA" if device == "cuda" else "CPU")
        runner = TrainingRunner(parameters, environment)
        runner.initialize()
        sizes = known_dimensions(runner.parameters.training, runner.graph, {})
        ranges = feature_ranges(parameters.loss, runner.graph)
        summary = runner.run(synthetic_loader(runner.parameters, runner.graph, sizes, ranges))
        print(f"a micro-batch of {runner.parameters.training.batch_size} samples was found")
        print(*performance_lines(runner.parameters, runner.graph, sizes, summary, environment.device, 1), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("environment", "batch_size"))
    parser.add_argument("--size", default="small", help="of GPT-2")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.verb == "environment":
        show_environment()
    else:
        find_batch_size(options.size, options.device)


if __name__ == "__main__":
    main()
