"""What a comparison runs on: the hardware in a line, and which of the packages that it could use are missing."""

from __future__ import annotations

import platform
import subprocess
from importlib.util import find_spec
from pathlib import Path

import torch

PEERS = Path(__file__).parent.parent / ".venv-peers"
"""Where `make peers` puts them: onnxruntime-training wants an older numpy and onnx than everything else."""
_ORT, _ONNX2TORCH = PEERS / "bin" / "python", PEERS / "onnx2torch"
ORT_PYTHON = str(_ORT) if _ORT.exists() else None
ONNX2TORCH = str(_ONNX2TORCH) if _ONNX2TORCH.exists() else None


def missing_packages(ort_python: str | None, onnx2torch: str | None) -> dict[str, str]:
    """What is missing -> what that means; names of ways that need it are those of `compare.WAYS`.

    Args:
        ort_python: of the environment that may have onnxruntime-training.
        onnx2torch: a folder that may hold it.
    """
    missing = {}
    if not _has_ort(ort_python):
        missing["onnxruntime-training"] = "left out (`make peers` installs it where there is a python up to 3.11)"
    folder = None if onnx2torch is None else Path(onnx2torch) / "onnx2torch"
    if find_spec("onnx2torch") is None and (folder is None or not folder.is_dir()):
        missing["onnx2torch"] = "left out (`make peers` installs it)"
    return missing


def _has_ort(python: str | None) -> bool:
    if python is None or not Path(python).exists():
        return False
    code = "from importlib.metadata import version; version('onnxruntime-training')"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def hardware(device: str, threads: int) -> str:
    """What it ran on, in a line."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"
