"""What is distributed: versions that agree, and every file of the package in the wheel."""

from __future__ import annotations

import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import yaml

import onward

ROOT = Path(__file__).resolve().parents[1]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert str(citation["version"]) == onward.__version__
    assert citation["license"] == project["license"]
    assert len(project["classifiers"]) > 5


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    """setuptools takes .py files by itself; others are named in pyproject.toml."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["onward"]
    tracked = subprocess.run(["git", "ls-files", "src/onward"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name.removeprefix("src/onward/") for name in tracked.stdout.splitlines() if not name.endswith(".py")]
    assert files
    assert [name for name in files if not any(fnmatch(name, pattern) for pattern in named)] == []


def test_every_folder_of_the_package_is_a_package() -> None:
    """A folder without `__init__.py` is not found, and missing where the wheel is installed."""
    folders = {path.parent for path in (ROOT / "src" / "onward").rglob("*.py")}
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").is_file()) == []
