"""The Pythons that other tools' conversions run in: a virtual environment for Keras and one for the rest, pinned, made
once in the cache folder.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

from benchmarks.found_models_packages import PACKAGES

HERE = Path(__file__).resolve().parent
_TOOLS = (
    "onnx==1.23.2", "onnxruntime==1.31.1", "scikit-learn==1.9.1", "skl2onnx==1.20.0", "lightgbm==4.7.0",
    "xgboost==3.2.0", "onnxmltools==1.16.0", "onnxsim==0.8.1", "onnxconverter-common==1.16.0",
)  # fmt: skip
_KERAS = ("tensorflow-cpu==2.21.0", "keras==3.15.1", "tf2onnx==1.17.0", "onnx==1.23.2", "onnxruntime==1.31.1")
_CONVERSIONS, _VARIANTS = HERE / "found_models_conversions.py", HERE / "found_models_variants.py"
CONVERTERS = {
    "sklearn": "scikit-learn 1.9.1 by skl2onnx 1.20.0",
    "trees": "LightGBM 4.7.0 and XGBoost 3.2.0 by onnxmltools 1.16.0",
    "keras": "Keras 3.15.1 by tf2onnx 1.17.0",
    "torch": "torch's older exporter (dynamo=False)",
}
"""Folder of conversions -> what they are."""


def collect_conversions(cache: Path) -> Iterator[str]:
    """Runs what has not run yet; yields a line for each file or for each tool that is not to be had."""
    files = cache / "files"
    for group, requirements in (("sklearn", _TOOLS), ("trees", _TOOLS), ("keras", _KERAS), ("torch", ())):
        if not any((files / group).glob("*.onnx")):
            name = "venv-keras" if group == "keras" else "venv-tools"
            python = _python(cache / name, requirements) if requirements else sys.executable
            yield from _run(group, python, _CONVERSIONS, group, str(files / group))
    if any((files / package.folder).exists() for package in PACKAGES):
        yield from _run("variants", _python(cache / "venv-tools", _TOOLS), _VARIANTS, str(files))


def _python(folder: Path, requirements: tuple[str, ...]) -> str | None:
    """The Python of an environment with these packages, or None: they cannot be installed here."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        done = subprocess.run([str(python), "-m", "pip", "install", "-q", *requirements], capture_output=True)
        if done.returncode != 0:
            return None
        (folder / "complete").write_text("\n".join(requirements) + "\n")
    return str(python)


def _run(what: str, python: str | None, script: Path, *arguments: str) -> Iterator[str]:
    if python is None:
        yield f"{what}: left out, its packages cannot be installed here"
        return
    done = subprocess.run([python, str(script), *arguments], capture_output=True, text=True, timeout=1800)
    yield from (line for line in done.stdout.splitlines() if ": " in line)
    if done.returncode != 0:
        yield f"{what}: exit code {done.returncode}: {done.stderr[-300:]}"
