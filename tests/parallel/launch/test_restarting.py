"""After which ends workers are started again, how often, and with which micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from onward.errors import ModelError, NodeError, OutOfMemoryError
from onward.parallel.launch import restarting
from onward.parallel.launch.restarting import LARGEST_BATCH, RESTARTED_AFTER, LaunchEnd, Restarts, launch_until_done
from onward.parallel.watch.cause import CAUSE_FILE, Cause, cause_of, leave_cause, read_cause

KILLED = LaunchEnd(1, Cause("death", "rank 1 of 2 (process 7) was ended by SIGKILL; all ranks end.\nmore"))
BUG = LaunchEnd(1, Cause("error", "division by zero", updates=7))
HANG = LaunchEnd(1, Cause("hang", "rank 0 waited 600 s", updates=7))
MEMORY = LaunchEnd(1, Cause("out of memory", "memory ran out", batch_size=8))
DONE = LaunchEnd(0)


def run(
    ends: Sequence[LaunchEnd],
    checkpoints: Sequence[str | None],
    most: int = 3,
    sizes: Sequence[int] | None = None,
) -> tuple[int, list[Mapping[str, str]]]:
    """The exit code of a run whose launches end so, and what each launch was given; `checkpoints` are the newest."""
    left, newest, given = list(ends), iter(checkpoints), list[Mapping[str, str]]()

    def launch(more: Mapping[str, str]) -> LaunchEnd:
        given.append(more)
        return left.pop(0)

    def smaller(tried: int | None) -> Sequence[int]:
        assert sizes is not None
        return [size for size in sizes if tried is None or size <= tried // 2]

    restarts = Restarts(
        most=most, newest_checkpoint=lambda: next(newest), smaller_batches=None if sizes is None else smaller
    )
    return launch_until_done(launch, restarts), given


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarting, "PAUSE_SECONDS", 0.0)


@pytest.mark.parametrize("end", [LaunchEnd(2), LaunchEnd(3), LaunchEnd(0), LaunchEnd(1, KILLED.cause, was_asked=True)])
def test_mistakes_interruptions_and_ends_on_demand_are_final(
    end: LaunchEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    code, given = run([end], ["c1"])
    assert (code, len(given)) == (end.exit_code, 1)
    assert capsys.readouterr().err == ""


def test_a_killed_run_is_restarted_with_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    code, given = run([KILLED, DONE], ["checkpoint-00000010"])
    assert code == 0
    assert given[0] == {}
    words = "restarting all ranks from checkpoint-00000010 (restart 1 of 3 without progress)."
    assert given[1] == {RESTARTED_AFTER: f"rank 1 of 2 (process 7) was ended by SIGKILL; all ranks end. Now {words}"}
    assert capsys.readouterr().err == f"onward train: {words}\n"


@pytest.mark.parametrize("end", [KILLED, HANG, LaunchEnd(1)])
def test_without_a_new_checkpoint_restarts_end(end: LaunchEnd, capsys: pytest.CaptureFixture[str]) -> None:
    code, given = run([end] * 9, [None] * 9)
    assert (code, len(given)) == (1, 4)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("onward train: not restarted: 3 restarts (distributed.max_restarts) did not help, no check")


def test_a_run_that_saves_meanwhile_is_restarted_any_number_of_times() -> None:
    code, given = run([KILLED] * 20 + [DONE], [f"checkpoint-{number}" for number in range(20)])
    assert (code, len(given)) == (0, 21)


def test_the_same_error_at_the_same_update_is_not_tried_a_third_time(capsys: pytest.CaptureFixture[str]) -> None:
    code, given = run([BUG] * 9, ["checkpoint-4"] * 9)
    assert (code, len(given)) == (1, 2)
    assert (
        "the same error occurred again at the same point (from checkpoint-4, then 7 updates)" in capsys.readouterr().err
    )


def test_another_error_is() -> None:
    other = LaunchEnd(1, Cause("error", "division by zero", updates=8))
    assert run([BUG, other, DONE], ["checkpoint-4"] * 9)[0] == 0


def test_max_restarts_of_none() -> None:
    assert len(run([KILLED], [], most=0)[1]) == 1


def test_memory_halves_the_micro_batch_until_none_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    ends = [
        MEMORY,
        LaunchEnd(1, Cause("out of memory", "memory", batch_size=3)),
        LaunchEnd(1, Cause("out of memory", "")),
    ]
    code, given = run(ends, ["c"] * 9, sizes=[1, 2, 3, 4, 6, 12])
    assert code == 1
    assert [one.get(LARGEST_BATCH) for one in given] == [None, "4", "1"]
    said = capsys.readouterr().err
    assert "restarting all ranks from c with micro-batches of 4 samples instead of 8; an update has as many" in said
    assert "not restarted: memory ran out, and no smaller micro-batch is possible" in said


def test_memory_without_the_wish_to_halve_is_a_crash_like_any_other() -> None:
    code, given = run([MEMORY, DONE], ["c"] * 9)
    assert code == 0
    assert LARGEST_BATCH not in given[1]


def test_a_node_that_memory_did_not_suffice_for_is_no_mistake_where_halving_is_asked_for() -> None:
    end = LaunchEnd(2, Cause("out of memory", "node", batch_size=8))
    assert run([end, DONE], ["c"] * 9, sizes=[4])[0] == 0
    assert len(run([end], ["c"] * 9)[1]) == 1


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "batch_size"),
    [
        (ZeroDivisionError("a bug"), "error", None),
        (ModelError("no memory"), "error", None),
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory", None),
        (MemoryError(), "out of memory", None),
        (OutOfMemoryError("step 3", 8), "out of memory", 8),
        (chained(NodeError("node"), RuntimeError("DefaultCPUAllocator: can't allocate memory")), "out of memory", None),
    ],
)
def test_the_cause_of_an_exception_reaches_the_launcher(
    error: Exception, kind: str, batch_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cause.json"
    cause = cause_of(error, "words", 5)
    assert (cause.kind, cause.batch_size) == (kind, batch_size)
    leave_cause(cause)
    assert not file.exists()
    monkeypatch.setenv(CAUSE_FILE, str(file))
    leave_cause(cause)
    assert read_cause(file) == cause
    file.write_text("{")
    assert read_cause(file) is None
