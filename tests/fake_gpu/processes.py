"""Processes that believe in a GPU: the library that they load before torch, and what they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).parent / "hooks.cpp"
COMPILER = os.environ.get("CXX", "g++")


def compile_hooks(folder: Path) -> Path:
    """`hooks.cpp` as a library."""
    made, home = folder / "hooks.so", Path(torch.__file__).parent
    libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home / 'lib'}"]
    flags = [
        "-std=c++20",
        "-O0",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    command = [COMPILER, *flags, f"-I{home / 'include'}", str(SOURCE), "-o", str(made), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return made


def ask(library: Path, folder: Path, *what: str) -> dict[str, Any]:
    """In its own process: torch looks for a GPU when it is imported, and never again."""
    answer, (kind, *names) = folder / "answer.json", what
    command = [sys.executable, "-m", "tests.fake_gpu", str(library), kind, str(answer), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(answer.read_text())
