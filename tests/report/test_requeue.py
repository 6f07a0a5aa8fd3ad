"""How an interrupted run says that it is continued."""

from __future__ import annotations

import pytest

from onward.report.requeue import interrupted, resume_hint


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/onward", "train", "my run.yaml", "--training.seed=3"])


def test_the_command_is_given_as_it_can_be_typed() -> None:
    expected = "The same command resumes from there: onward train 'my run.yaml' --training.seed=3"
    assert resume_hint({}) == expected
    assert resume_hint({"TORCHELASTIC_RUN_ID": "1", "ONWARD_LAUNCHED": "1"}) == expected
    assert "there, started by torchrun as before: onward train" in resume_hint({"TORCHELASTIC_RUN_ID": "1"})
    assert str(interrupted("SIGTERM", "after step 3", "c/checkpoint-00000003")) == (
        f"stopped by SIGTERM after step 3; saved as c/checkpoint-00000003. {expected}"
    )


def test_a_program_of_the_users_own_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/opt/ipykernel_launcher.py", "-f", "x.json"])
    assert resume_hint({}) == "The same command resumes from there."


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"SLURM_JOB_ID": "712"}, "712"),
        ({"SLURM_JOB_ID": "712", "SLURM_ARRAY_JOB_ID": "700", "SLURM_ARRAY_TASK_ID": "4"}, "700_4"),
    ],
)
def test_under_slurm_the_job_can_be_put_back(variables: dict[str, str], job: str) -> None:
    assert resume_hint(variables).endswith(f"\nTo put the Slurm job back into its queue: scontrol requeue {job}")
