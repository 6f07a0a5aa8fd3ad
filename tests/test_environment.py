"""What belongs to the machine: the device, threads, log level and determinism of a process."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.commands.training import train
from onward.data.in_memory import InMemoryDataLoader
from onward.environment import ALLOCATOR_VARIABLES, Environment
from onward.errors import ParametersError
from onward.runner import TrainingRunner
from tests.mlp import assert_same_bits, data, parameters, save_mlp, weights_of

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what an environment sets for the whole process."""
    threads, level = torch.get_num_threads(), logging.getLogger("onward").level
    for name in ("CUBLAS_WORKSPACE_CONFIG", *ALLOCATOR_VARIABLES):
        monkeypatch.setenv(name, "")  # so that it is put back, too, where it was not set
        monkeypatch.delenv(name)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    logging.getLogger("onward").setLevel(level)


def test_nothing_said_changes_nothing_but_the_log() -> None:
    threads = torch.get_num_threads()
    Environment().apply()
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert logging.getLogger("onward").level == logging.WARNING


def test_what_is_said_is_set() -> None:
    Environment(threads=1, log_level=logging.DEBUG, deterministic=True).apply()
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert logging.getLogger("onward").level == logging.DEBUG


def test_the_device_is_chosen_by_itself() -> None:
    assert Environment(execution_provider="CPU").device == torch.device("cpu")
    assert Environment().device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param(
            {"execution_provider": "CUDA"},
            "execution_provider is 'CUDA', but torch finds no GPU here; install a CUDA build of torch and a driver, or "
            "use 'CPU'.",
            marks=WITHOUT_GPU,
        ),
        ({"execution_provider": "TPU"}, "execution_provider is 'TPU'; expected 'CPU' or 'CUDA'."),
        ({"threads": 0}, "threads is 0; expected a whole number of at least 1, or None."),
        ({"threads": "two"}, "threads is 'two'; expected a whole number of at least 1, or None."),
    ],
)
def test_what_cannot_be(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    """Said by the runner before it reads the model, which is not even there."""
    runner = TrainingRunner(parameters(tmp_path), Environment(**fields))
    with pytest.raises(ParametersError) as caught:
        runner.initialize()
    assert str(caught.value) == words


@WITHOUT_GPU
@pytest.mark.parametrize("sizes", [{}, {"distributed.data_parallel_size": "2"}])
def test_the_command_says_that_there_is_no_gpu(tmp_path: Path, sizes: dict[str, str]) -> None:
    """Before it looks at the model or the data, and before it starts processes."""
    (tmp_path / "run.yaml").write_text(
        "paths: {model_path: none.onnx}\nloss: {type: output, prediction: loss}\n"
        "training: {batch_size: 1, num_train_steps: 1}\nlearning_rate: {initial_lr: 1.0}\n"
    )
    with pytest.raises(ParametersError, match=r"^execution_provider is 'CUDA', but torch finds no GPU here; install"):
        train(tmp_path / "run.yaml", {"machine.execution_provider": "CUDA", **sizes})


def test_deterministic_runs_are_equal_bit_by_bit(tmp_path: Path) -> None:
    save_mlp(tmp_path, dropout=0.2, normalized=True)
    results = []
    for _ in range(2):
        runner = TrainingRunner(parameters(tmp_path), Environment(deterministic=True, threads=1))
        runner.initialize()
        runner.run(InMemoryDataLoader(data(24)))
        results.append({name: tensor.cpu() for name, tensor in weights_of(runner).items()})
    assert_same_bits(*results)


def test_segments_on_gpus_can_grow() -> None:
    Environment().apply()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_what_the_user_asks_of_the_allocator_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    Environment().apply()
    assert {variable: os.environ.get(variable) for variable in ALLOCATOR_VARIABLES} == {
        **dict.fromkeys(ALLOCATOR_VARIABLES),
        name: "max_split_size_mb:128",
    }


def test_workers_and_this_process_have_it_before_a_gpu_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Already when `train` reads its file, which is before it asks for devices or starts others."""
    seen: list[str | None] = []

    def load(*_: Any) -> None:
        seen.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        raise ParametersError("enough")

    monkeypatch.setattr("onward.parameters.Parameters.load", load)
    with pytest.raises(ParametersError, match="enough"):
        train(tmp_path / "run.yaml")
    assert seen == ["expandable_segments:True"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_torch_takes_the_setting(tmp_path: Path) -> None:
    """In its own process: the allocator reads it once."""
    program = (
        "from onward.environment import Environment; import torch; Environment().apply();"
        "torch.zeros(1, device='cuda');"
        "print(any(s['is_expandable'] for s in torch.cuda.memory_snapshot()))"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


FAULTS = """
import os, resource, sys
for name in [n for n in os.environ if n.startswith("MALLOC_") or n == "GLIBC_TUNABLES"]:
    del os.environ[name]
os.environ.update(a.split("=", 1) for a in sys.argv[1:])
import torch
from onward.environment import keep_freed_memory
asked = keep_freed_memory()
def use():
    for megabytes in (8, 48, 8):
        torch.ones(megabytes * 2**18)
for _ in range(10):  # until what is freed has the right sizes
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(asked, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")
def test_freed_memory_is_kept() -> None:
    """Pages of 4 KiB that the system gives to the process: 48 MB are 12,288 of them, if they come anew each time."""
    found = {}
    for setting in ((), ("MALLOC_ARENA_MAX=2",)):
        command = [sys.executable, "-c", FAULTS, *setting]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        found[setting] = output[0], int(output[1])
    assert found[()][0] == "True"
    assert found[()][1] < 1000
    assert found[("MALLOC_ARENA_MAX=2",)][0] == "False", "the user has asked for something"
    assert found[("MALLOC_ARENA_MAX=2",)][1] > 10 * 12_000
