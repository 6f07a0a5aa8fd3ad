"""Installed packages against what onward's own metadata asks for: required ones, and those of each extra."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

from packaging.requirements import Requirement

from onward import __version__
from onward.diagnosis.findings import Finding

LEFT_OUT = ("dev", "recipes")
"""Extras for people who develop onward or run its recipes; their packages are no loss to a user."""


def check_packages() -> Iterator[Finding]:
    """Python, onward and every package that it requires or can use."""
    yield Finding("versions", f"onward {__version__}, Python {platform.python_version()}, {platform.platform()}")
    if not sys.platform.startswith("linux"):
        yield Finding(
            "versions",
            f"this is {sys.platform}; onward is tested on Linux only",
            "note",
            "Train in one process; several processes need Linux.",
        )
    try:
        lines = metadata.requires("onward") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "versions",
            "onward runs from its source folder and is not installed; its requirements are not checked",
            "note",
            "Run pip install -e . to have the packages checked.",
        )
        return
    yield from check_requirements(lines)


def check_requirements(lines: Sequence[str]) -> Iterator[Finding]:
    """Findings about requirements as the metadata of a distribution writes them, such as `torch>=2.11`."""
    requirements = [Requirement(line) for line in lines]
    extras = sorted({extra for one in requirements if (extra := _extra_of(one)) and extra not in LEFT_OUT})
    needed = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    lacks = {one: text for one in needed if (text := _lack(one)) is not None}
    if lacks:
        names = " ".join(f'"{one.name}{one.specifier}"' for one in lacks)
        yield Finding("versions", f"required packages: {'; '.join(lacks.values())}", "problem", f"pip install {names}")
    else:
        found = ", ".join(f"{one.name} {metadata.version(one.name)}" for one in needed)
        yield Finding("versions", f"required packages: {found}")
    for extra in extras:
        of_extra = [one for one in requirements if _extra_of(one) == extra]
        lacks = {one: text for one in of_extra if (text := _lack(one)) is not None}
        if lacks:
            yield Finding(
                "extras", f"{extra}: {'; '.join(lacks.values())}", "note", f'To use it: pip install "onward[{extra}]"'
            )
        else:
            yield Finding("extras", f"{extra}: {', '.join(f'{x.name} {metadata.version(x.name)}' for x in of_extra)}")


def _extra_of(requirement: Requirement) -> str:
    """The extra that a requirement belongs to; "" for none."""
    text = str(requirement.marker or "")
    _, found, rest = text.partition("extra ==")
    return rest.strip().strip("\"'").split('"')[0].split("'")[0] if found else ""


def _lack(requirement: Requirement) -> str | None:
    """What is wrong with the installed package; None where it satisfies the requirement."""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version}, but {requirement.specifier} is required"
    return None
