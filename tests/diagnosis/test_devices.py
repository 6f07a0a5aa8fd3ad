"""What is said of cores, GPUs and launchers, and how fast products are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from onward.diagnosis import devices
from onward.diagnosis.devices import check_devices, check_products


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(devices, "free_memory_bytes", lambda: 1e9)
    monkeypatch.setattr(devices, "loaded_allocator", lambda: "tcmalloc")
    notes = {one.text: one.remedy for one in check_devices() if one.status == "note"}
    assert notes == {
        "8 threads share 2 cores": "Set machine.threads: 2, or OMP_NUM_THREADS=2.",
        "1.0 GB free": "Close other programs, or train with smaller batches.",
    }


@pytest.mark.parametrize("name", ["tcmalloc", None])
def test_the_allocator_of_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    monkeypatch.setattr(devices, "is_linux", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "loaded_allocator", lambda: name)
    (found,) = [one for one in check_devices() if "allocated" in one.text]
    if name:
        assert (found.text, found.status) == ("allocated by tcmalloc", "ok")
        return
    assert (found.text, found.status, found.remedy) == (
        "allocated by the C library, which fragments: a process may take 1.4 times the memory that its run needs",
        "note",
        "If memory is short: install tcmalloc (Debian: apt install libtcmalloc-minimal4), and train with "
        "LD_PRELOAD=libtcmalloc_minimal.so.4 in the environment.",
    )
    for home, fact, value in ((devices, "is_linux", False), (torch.cuda, "is_available", True)):
        with monkeypatch.context() as there:
            there.setattr(home, fact, lambda value=value: value)
            assert not list(devices._check_allocator())


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


def test_rates_of_products() -> None:
    found = [one.text for one in check_products(0.02)]
    assert [text.partition(":")[0] for text in found[:2]] == ["cpu, float32", "cpu, bfloat16"]
