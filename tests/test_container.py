"""The Dockerfile against the project: what it copies is there, and what it installs and runs has these names."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_dockerfile_names_what_is_there() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = [source for name, rest in steps if name == "COPY" for source in rest.split()[:-1]]
    assert {"src", "pyproject.toml", "constraints.txt", *project["license-files"], project["readme"]} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
    (extras,) = re.findall(r"\.\[([a-z,]+)\]", text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (entry,) = [json.loads(rest) for name, rest in steps if name == "ENTRYPOINT"]
    assert set(entry) <= set(project["scripts"])
