"""Installed packages against what onward asks for."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from onward.diagnosis.packages import check_packages, check_requirements


def test_packages_that_are_too_old_or_missing() -> None:
    numpy = metadata.version("numpy")
    lines = ["numpy>=1.0", "torch>=99", "no-such-package>=1", 'pillow>=99; extra == "pack"', 'mypy; extra == "dev"']
    required, pack = check_requirements(lines)
    assert required.status == "problem"
    assert required.text == (
        f"required packages: torch is {metadata.version('torch')}, but >=99 is required; "
        "no-such-package is not installed"
    )
    assert required.remedy == 'pip install "torch>=99" "no-such-package>=1"'
    assert (pack.topic, pack.status, pack.remedy) == ("extras", "note", 'To use it: pip install "onward[pack]"')
    (fine,) = check_requirements(["numpy>=1.0", 'psutil; sys_platform == "plan9"'])
    assert (fine.status, fine.text) == ("ok", f"required packages: numpy {numpy}")


def test_onward_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert [one.status for one in check_packages()][-1] == "note"
