"""What is installed is what was locked: versions, hashes, advisories, and the bill of materials."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def tool(name: str) -> ModuleType:
    """A program of dev/ as a module."""
    loader = SourceFileLoader(f"dev_{name}", str(ROOT / "dev" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


lock, audit = tool("lock"), tool("audit")


def test_every_locked_package_has_a_hash() -> None:
    for path, least in ((lock.LOCK, 100), (lock.CUDA_LOCK, 10), (lock.CPU_LOCK, 1), (lock.DOCS_LOCK, 10)):
        entries = lock.locked(path)
        assert len(entries) == len(re.findall(r"^[\w.-]+==", path.read_text(), re.MULTILINE)) >= least
        assert all(hashes for _, hashes in entries.values())


def test_the_builds_of_torch_are_two_files_of_one_version() -> None:
    (cpu, cpu_hashes), (cuda, cuda_hashes) = (lock.locked(path)["torch"] for path in (lock.CPU_LOCK, lock.CUDA_LOCK))
    assert cpu == f"{cuda}+cpu"
    assert cpu_hashes.isdisjoint(cuda_hashes)
    assert "torch" not in lock.locked(lock.LOCK)


def test_the_lock_is_what_the_project_asks_for() -> None:
    assert lock.differences() == []


def test_a_package_that_is_not_locked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "requirements", lambda: ["torch>=2.11", "left-pad>=1"])
    monkeypatch.setattr(lock, "constraints", lambda: {"torch": "2.12.0", "right-pad": "1.0"})
    version = lock.locked(lock.CUDA_LOCK)["torch"][0]
    assert lock.differences() == [
        "left-pad is asked for by pyproject.toml and not locked",
        f"torch is 2.12.0 in constraints.txt and {version} in lock.txt",
        "right-pad is in constraints.txt and not locked",
    ]


def test_the_lock_holds_all_that_its_packages_need() -> None:
    """As far as they are installed here; nothing is installed that has no hash."""
    entries = lock.all_locked()
    missing = set()
    for name in entries:
        try:
            wanted = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for one in map(Requirement, wanted):
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                needed = canonicalize_name(one.name)
                if needed not in entries:
                    missing.add(f"{needed}, by {name}")
    assert missing == set()


def test_a_file_with_other_bytes_is_not_installed(tmp_path: Path) -> None:
    """pip refuses a wheel of the right name and version whose hash is not the locked one."""
    (tmp_path / "six-1.17.0-py2.py3-none-any.whl").write_bytes(b"not the wheel that was locked")
    version, hashes = lock.locked(lock.LOCK)["six"]
    assert version == "1.17.0"
    (tmp_path / "lock.txt").write_text(f"six==1.17.0 --hash=sha256:{min(hashes)}\n")
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(tmp_path), "--no-deps"]
    command += ["--ignore-installed", "--target", str(tmp_path / "into"), "--require-hashes", "-r"]
    done = subprocess.run(
        [*command, str(tmp_path / "lock.txt")], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "into").exists()


def test_no_advisory_applies() -> None:
    data = json.loads(audit.DATA.read_text())
    assert len(data["advisories"]) > 100
    assert list(audit.findings(data["advisories"])) == []


@pytest.mark.parametrize(
    ("version", "affected"), [("1.0", False), ("1.1", True), ("1.5", True), ("2.0", False), ("3.0", True), ("9", True)]
)
def test_an_advisory_covers_its_ranges(version: str, affected: bool) -> None:
    assert audit.is_affected({"ranges": [["1.1", "2.0"], ["3.0", None]]}, version) is affected


def test_what_setuptools_carries_is_not_installed() -> None:
    before = audit.installed()
    importlib.import_module("setuptools")
    assert any(Path(folder).name == "_vendor" for folder in sys.path)
    assert audit.installed() == before


def test_an_affected_package_is_found_wherever_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    advisory = {"package": "left-pad", "id": "PYSEC-0", "aliases": ["CVE-0"], "ranges": [["0", "2.0"]]}
    for name in ("locked", "installed", "oldest_allowed"):
        monkeypatch.setattr(audit, name, lambda: {"left-pad": "1.9"})
    end = "left-pad 1.9, affected by PYSEC-0 CVE-0; fixed in 2.0"
    assert list(audit.findings([advisory])) == [
        f"lock.txt pins {end}", f"installed is {end}", f"pyproject.toml allows {end}"
    ]  # fmt: skip


def test_oldest_allowed_versions_are_the_lower_bounds() -> None:
    oldest = audit.oldest_allowed()
    assert oldest["torch"] == "2.11"
    assert oldest["pillow"] == "10.3"


def test_the_bill_of_materials_names_every_package(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx_py", reason="cyclonedx-bom is not installed")
    file = tmp_path / "sbom.json"
    subprocess.run(
        [str(ROOT / "dev" / "sbom"), str(file)], check=True, capture_output=True, env={"PYTHON": sys.executable}
    )
    content = json.loads(file.read_text())
    assert (content["bomFormat"], content["specVersion"]) == ("CycloneDX", "1.6")
    assert content["metadata"]["component"]["name"] == "onward"
    listed = {canonicalize_name(one["name"]): one for one in content["components"]}
    installed = set(audit.installed()) - {"onward"}
    assert installed <= set(listed)
    assert all(one["purl"].startswith("pkg:pypi/") for name, one in listed.items() if name in installed)
    assert listed["torch"]["version"] == importlib.metadata.version("torch")


def test_the_threat_model_names_tests_and_tools_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`((?:tests|dev|docs)/[\w./-]+?)/?(?:::(\w+))?`", text)
    assert len(named) > 20
    for path, test in named:
        assert (ROOT / path).exists(), path
        if test:
            assert f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"
