"""What belongs to the machine: the device, threads, log level and determinism of a process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.environment import Environment
from onward.errors import ParametersError
from onward.runner import TrainingRunner
from tests.mlp import assert_same_bits, data, parameters, save_mlp, weights_of

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what an environment sets for the whole process."""
    threads, level = torch.get_num_threads(), logging.getLogger("onward").level
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
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


def test_deterministic_runs_are_equal_bit_by_bit(tmp_path: Path) -> None:
    save_mlp(tmp_path, dropout=0.2, normalized=True)
    results = []
    for _ in range(2):
        runner = TrainingRunner(parameters(tmp_path), Environment(deterministic=True, threads=1))
        runner.initialize()
        runner.run(InMemoryDataLoader(data(24)))
        results.append({name: tensor.cpu() for name, tensor in weights_of(runner).items()})
    assert_same_bits(*results)
