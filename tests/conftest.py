"""What holds for all tests."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import pytest
import torch
from torch._export import utils as export_tables
from torch.onnx._internal.exporter._registration import ONNXRegistry

from onward.report.phases import Phases

LONGEST_FILES = (
    "tests/test_docs.py", "tests/lowering/test_architectures.py", "tests/invariants/test_killed_layouts.py",
    "tests/test_attacks.py", "tests/invariants/test_layouts_data.py", "tests/invariants/test_fake_gpu.py",
    "tests/invariants/test_layouts.py", "tests/parallel/test_launches.py", "tests/commands/test_init.py",
    "tests/invariants/test_collectives.py", "tests/graph/fusion/test_embedding_bag.py",
    "tests/parallel/rendezvous/test_listening.py", "tests/invariants/test_resume.py", "tests/commands/test_phases.py",
    "tests/lowering/test_exports.py", "tests/lowering/test_found_models.py", "tests/invariants/test_loss_curves.py",
)  # fmt: skip
"""Those that take one to five minutes each. They begin first: a file is one worker's, which others wait for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; `dev/test` has workers take files in this order."""
    place = {name: index for index, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


COUNT_FROZEN = gc.get_freeze_count
"""Python's own."""


def pytest_collection_finish() -> None:
    """What is imported by now stays: walking through it would take half the time of a small training run.

    So would counting it, which Python does by walking, too.
    """
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 1


@pytest.fixture(scope="session", autouse=True)
def _exporter_that_knows_its_operators() -> Iterator[None]:
    """torch's exporter builds the same table of operators at each call: 0.9 s of the 1.3 s that a layer takes."""
    table = functools.cache(ONNXRegistry.from_torchlib)

    def copy_of_table(**opset_version: int) -> ONNXRegistry:
        known, copied = table(**opset_version), ONNXRegistry()
        copied._opset_version = known.opset_version
        copied.functions = {target: [*found] for target, found in known.functions.items()}
        return copied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copy_of_table))
        patch.setattr(
            export_tables, "_materialize_cpp_cia_ops", functools.cache(export_tables._materialize_cpp_cia_ops)
        )
        yield


@pytest.fixture(autouse=True)
def _patient_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine any command may take longer than a second; what it says of that is tested by itself."""
    monkeypatch.setattr("onward.cli.Phases", functools.partial(Phases, announced_after_seconds=600.0))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch's compiler generates other code for several threads than for the one that workers have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
