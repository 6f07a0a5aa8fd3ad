"""`onward doctor`: every check on this machine, and what it says where something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onward.cli import main
from onward.diagnosis import devices, disks, exchange
from onward.diagnosis.devices import check_devices, check_products
from onward.diagnosis.disks import check_disks
from onward.diagnosis.exchange import check_exchange
from onward.diagnosis.findings import Finding, render, to_json
from onward.diagnosis.packages import check_packages, check_requirements


def test_the_whole_command() -> None:
    command = [sys.executable, "-m", "onward", "doctor", "--seconds", "0.4", "--processes", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is True
    assert {one["topic"] for one in told["findings"]} >= {
        "versions",
        "cpu",
        "memory",
        "gpu",
        "disk",
        "speed",
        "communication",
    }
    sums = [one["text"] for one in told["findings"] if one["topic"] == "communication"]
    assert any("over 2 processes (cpu, gloo)" in text and text.endswith("sums correct") for text in sums)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "0"], "onward doctor: --seconds is 0; pass a number above 0.\n"),
        (["--processes", "0"], "onward doctor: --processes is 0; pass at least 1.\n"),
        (
            ["--folder", "nowhere"],
            "onward doctor: --folder 'nowhere' is not a folder; pass the folder to write runs to.\n",
        ),
    ],
)
def test_options_that_are_none(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err == words


def test_a_problem_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = [Finding("exchange", "2 processes cannot exchange", "problem", "Look at firewalls.")]
    monkeypatch.setattr(exchange, "check_exchange", lambda *_: broken)
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--seconds", "0.02"])
    assert stop.value.code == 1
    text = capsys.readouterr().out
    assert "exchange  PROBLEM  2 processes cannot exchange\n                   -> Look at firewalls.\n" in text
    assert "1 problem, " in text.splitlines()[-1]


def test_findings_as_text_and_json() -> None:
    found = [Finding("disk", "full", "note", "Free space."), Finding("versions", "fine")]
    assert render(found) == (
        "disk      note     full\n                   -> Free space.\nversions  ok       fine\n\n0 problems, 1 note"
    )
    assert json.loads(to_json(found)) == {
        "ok": True,
        "findings": [
            {"topic": "disk", "text": "full", "status": "note", "remedy": "Free space."},
            {"topic": "versions", "text": "fine", "status": "ok", "remedy": ""},
        ],
    }


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


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(devices, "free_memory_bytes", lambda: 1e9)
    notes = {one.text: one.remedy for one in check_devices() if one.status == "note"}
    assert notes == {
        "8 threads share 2 cores": "Set machine.threads: 2, or OMP_NUM_THREADS=2.",
        "1.0 GB free": "Close other programs, or train with smaller batches.",
    }


def test_variables_left_over_from_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (problem,) = [one for one in check_devices() if one.status == "problem"]
    assert problem.text.startswith("RANK=3 is set, but not WORLD_SIZE")
    assert problem.remedy == "Unset the environment variables left over from another launcher."


def test_a_driver_whose_gpu_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices.shutil, "which", lambda name: f"/usr/bin/{name}")
    (problem,) = [one for one in check_devices() if one.topic == "gpu"]
    assert problem.status == "problem"
    assert problem.text.startswith(f"nvidia-smi is installed, but torch {torch.__version__} finds no GPU; it is ")


def test_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", major=9, minor=0)
    for name, value in (
        ("is_available", True),
        ("device_count", 1),
        ("get_device_properties", properties),
        ("mem_get_info", (70e9, 80e9)),
        ("is_bf16_supported", True),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    (gpu,) = [one for one in check_devices() if one.topic == "gpu"]
    assert gpu.text.startswith("0: H100, 70.0 of 80.0 GB free, compute capability 9.0, CUDA ")


def test_disks_that_are_full_or_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (written, *_) = check_disks(tmp_path)
    assert written.text.startswith(f"this folder ({tmp_path}): ")
    assert written.text.endswith(" MB/s")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(disks.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6, total=64 * 2**20))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    full, *_, shared = check_disks(tmp_path)
    assert (full.status, full.remedy) == (
        "note",
        "Free some space: a checkpoint with AdamW takes 12 bytes per parameter.",
    )
    assert (shared.status, shared.remedy) == ("problem", "Start the container with --shm-size=8g or --ipc=host.")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disks.tempfile, "TemporaryDirectory", refuse)
    refused, *_ = check_disks(tmp_path)
    assert refused.text == f"this folder ({tmp_path}) cannot be written: Permission denied"
    assert refused.status == "problem"


def test_rates_of_products() -> None:
    found = [one.text for one in check_products(0.02)]
    assert [text.partition(":")[0] for text in found[:2]] == ["cpu, float32", "cpu, bfloat16"]


def test_processes_that_cannot_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "launch_workers", lambda *_: 1)
    (problem,) = check_exchange(2, 0.1)
    assert problem.status == "problem"
    assert problem.text == "2 processes on this machine's cpu cannot communicate (exit code 1; see above)"
    (note,) = check_exchange(1, 0.1)
    assert note.status == "note"
