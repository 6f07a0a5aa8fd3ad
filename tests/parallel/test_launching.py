"""What `onward train` checks before it starts workers, and which of their ends it reports."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from onward.errors import ParametersError
from onward.parallel.launching import _explain, check_room, worker_count
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


def failure(exit_code: int, after_seconds: int = 0) -> ProcessFailure:
    one = ProcessFailure(local_rank=0, pid=123, exitcode=exit_code, error_file="")
    one.timestamp = 1_000 + after_seconds
    return one


@pytest.mark.parametrize(
    ("failures", "exit_code", "words"),
    [
        ({1: failure(2), 0: failure(-15)}, 2, ""),
        ({0: failure(3), 1: failure(3)}, 3, ""),
        # A survivor is seen to end together with the killed one; a stopped one is killed much later.
        ({0: failure(1), 2: failure(-9)}, 1, "rank 2 of 3 (process 123) was ended by SIGKILL"),
        ({0: failure(2), 2: failure(-9, after_seconds=30)}, 2, ""),
        ({1: failure(-11), 0: failure(-15)}, 1, "rank 1 of 3 (process 123) was ended by SIGSEGV"),
        ({1: failure(-15), 0: failure(-15)}, 1, "rank 1 of 3 (process 123) was ended by SIGTERM"),
    ],
)
def test_first_cause_decides(
    failures: dict[int, ProcessFailure], exit_code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _explain(failures, 3) == exit_code
    said = capsys.readouterr().err
    assert said.startswith(f"onward train: {words}") if words else not said
