"""What systems tell, and a run on a system that has none of what only Linux has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onward import operating_system
from onward.errors import ParametersError
from onward.operating_system import (
    free_memory_bytes,
    is_amd,
    is_running,
    loaded_allocator,
    peak_memory_bytes,
    processor_name,
    usable_cores,
)
from onward.parallel.launch.launching import check_room
from onward.parameters import Distributed
from tests.mlp import data, save_mlp, write_shards

ELSEWHERE = """
import builtins, io, os, shutil, signal, sys
import psutil, torch, onnx, google.protobuf, tensorboard  # what reads /proc for itself, and does without elsewhere
disk = shutil.disk_usage("/")
shutil.disk_usage = lambda path: disk  # Windows has it, by another call than statvfs
for name in ("fcntl", "resource", "pwd", "grp"):
    sys.modules[name] = None
for module, names in ((os, ("sched_getaffinity", "O_DIRECTORY", "getsid", "killpg", "getuid", "statvfs")),
                      (signal, ("SIGUSR1", "SIGHUP", "SIGCONT"))):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
real_open, real_stat = io.open, os.stat
def no_proc(real):
    def call(path, *more, **options):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *more, **options)
    return call
from onward import operating_system
operating_system.is_linux = lambda: False
# psutil reads /proc on Linux, of course; what it would say elsewhere is what it says here.
from types import SimpleNamespace
memory = psutil.virtual_memory()
psutil.virtual_memory = lambda: memory
told = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=10**8), status=lambda: "running",
                       create_time=lambda: 1.0)
psutil.Process = lambda *pid: told
psutil.pid_exists = lambda pid: False
psutil.boot_time = lambda: 1.0
io.open = builtins.open = no_proc(real_open)
os.stat = no_proc(real_stat)
from onward.cli import main
sys.exit(main(sys.argv[1:]))
"""


def machine(root: Path, **files: str) -> Path:
    """A folder like `/`, with the free memory of a machine of 8 MiB and the files of a control group."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 16384 kB\nMemFree: 1024 kB\nMemAvailable:    8192 kB\n")
    (root / "sys/fs/cgroup/memory").mkdir(parents=True)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name.replace("_dot_", ".")).write_text(text)
    return root


def test_what_is_free_of_a_machine(tmp_path: Path) -> None:
    assert free_memory_bytes(machine(tmp_path)) == 8 * 2**20


@pytest.mark.parametrize(
    ("limit", "free"), [("max\n", 8 * 2**20), ("5000000\n", 4_000_000), ("99999999999\n", 8 * 2**20)]
)
def test_a_container_has_less(tmp_path: Path, limit: str, free: int) -> None:
    root = machine(tmp_path, memory_dot_max=limit, memory_dot_current="1000000\n")
    assert free_memory_bytes(root) == free


@pytest.mark.parametrize("name", ["tcmalloc", "jemalloc", "mimalloc", None])
def test_the_library_that_gives_memory(tmp_path: Path, name: str | None) -> None:
    assert loaded_allocator(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    lines = ["7f00-7f01 r-xp 0 08:01 1 /usr/lib/libc.so.6", f"7f02-7f03 r-xp 0 08:01 2 /usr/lib/lib{name}_x.so.4"]
    (tmp_path / "proc/self/maps").write_text("\n".join(lines if name else lines[:1]))
    assert loaded_allocator(tmp_path) == name


def test_an_older_container(tmp_path: Path) -> None:
    root = machine(tmp_path)
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("5000000\n")
    (root / "sys/fs/cgroup/memory/memory.usage_in_bytes").write_text("6000000\n")
    assert free_memory_bytes(root) == 0


def test_what_this_machine_tells() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert peak_memory_bytes() > 10_000_000
    assert is_running(os.getpid())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not is_running(ended.pid)


def test_the_name_of_a_processor(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9004\n")
    assert processor_name(tmp_path) == "AMD EPYC 9004"
    assert is_amd(tmp_path)
    assert isinstance(processor_name(tmp_path / "nothing"), str)


def test_one_process_trains_on_a_system_that_is_not_linux(tmp_path: Path) -> None:
    """Simulated: what only Linux or only POSIX has is taken away. macOS and Windows themselves are not tested."""
    save_mlp(tmp_path)
    write_shards(tmp_path / "train", data(24))
    (tmp_path / "run.yaml").write_text(
        "paths: {model_path: mlp.onnx, train_data_dir: train, test_data_dir: train, output_dir: out}\n"
        "loss: {type: softmax_cross_entropy, prediction: logits, label: label}\n"
        "training: {batch_size: 4, num_train_steps: 8}\n"
        "learning_rate: {initial_lr: 0.1}\n"
        "checkpoint: {checkpoints_dir: out/checkpoints, checkpoint_period: 4}\n"
        "tensorboard: {log_dir: out/board}\n"
    )
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    command = [
        sys.executable,
        str(tmp_path / "elsewhere.py"),
        "train",
        "run.yaml",
        "--machine.execution_provider",
        "CPU",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out/mlp_trained.onnx").is_file()
    measured = subprocess.run(
        [*command, "--training.is_perf_test", "true"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert measured.returncode == 0, measured.stdout + measured.stderr
    assert "95 MiB at most in this process" in measured.stdout


def test_several_processes_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_system, "is_linux", lambda: False)
    with pytest.raises(ParametersError) as refused:
        check_room(Distributed(data_parallel_size=2), "cpu")
    assert str(refused.value) == (
        "distributed: data_parallel_size 2 * horizontal_parallel_size 1 * pipeline_parallel_size 1 = 2 processes, "
        f"which onward starts on Linux only; this is {sys.platform}. Set these sizes to 1."
    )
