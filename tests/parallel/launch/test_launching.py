"""What `onward train` checks before it starts workers, and which of their ends it reports."""

from __future__ import annotations

import pytest
import torch

from onward.errors import ParametersError
from onward.parallel.launch.launching import EndedWorker, _explain, check_room, worker_count
from onward.parameters.distributed import Distributed

SIZES = Distributed(data_parallel_size=2, horizontal_parallel_size=3, pipeline_parallel_size=1)


def test_workers_are_the_product_of_the_sizes() -> None:
    assert worker_count(SIZES) == 6


def test_more_workers_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ParametersError) as caught:
        check_room(Distributed(data_parallel_size=2, horizontal_parallel_size=3, use_nccl=False), "cuda")
    assert "data_parallel_size 2 * horizontal_parallel_size 3 * pipeline_parallel_size 1 = 6 processes" in str(
        caught.value
    )
    assert "this machine has 4. Make the product at most 4, start on several machines" in str(caught.value)
    check_room(SIZES, "cpu")


def test_nccl_on_cpus_is_refused_before_workers_start() -> None:
    with pytest.raises(ParametersError, match="use_nccl is true"):
        check_room(Distributed(data_parallel_size=2, use_nccl=True), "cpu")


def ended(rank: int, exit_code: int, after_seconds: float = 0) -> EndedWorker:
    return EndedWorker(rank, 123, exit_code, 1_000 + after_seconds)


@pytest.mark.parametrize(
    ("failures", "exit_code", "words"),
    [
        ([ended(1, 2), ended(0, -15)], 2, ""),
        ([ended(0, 3), ended(1, 3)], 3, ""),
        # A survivor is seen to end together with the killed one; a stopped one is killed much later.
        ([ended(0, 1), ended(2, -9)], 1, "rank 2 of 3 (process 123) was ended by SIGKILL"),
        ([ended(0, 2), ended(2, -9, after_seconds=30)], 2, ""),
        ([ended(1, -11), ended(0, -15)], 1, "rank 1 of 3 (process 123) was ended by SIGSEGV"),
        ([ended(1, -15), ended(0, -15)], 1, "rank 1 of 3 (process 123) was ended by SIGTERM"),
    ],
)
def test_first_cause_decides(
    failures: list[EndedWorker], exit_code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, cause = _explain(failures, 3)
    assert found == exit_code
    said = capsys.readouterr().err
    assert said == (f"onward train: {cause.text}\n" if cause else "")
    assert said.startswith(f"onward train: {words}") if words else not said
