"""How an interrupted run is continued, in words: the command, and under Slurm what puts the job back into its queue."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from onward.checkpoint.run_checkpoints import GO_ON
from onward.errors import Interrupted, OnwardError
from onward.parallel.rendezvous.launcher import LAUNCHED_BY_US
from onward.report.run_record import command_line

_OWN_NAMES = ("onward", "__main__.py")


def interrupted(signal_name: str, when: str, place: str) -> Interrupted:
    """The end of a run that was stopped by a signal and is saved.

    Args:
        signal_name: of the signal.
        when: "after step 12".
        place: of the checkpoint.
    """
    return Interrupted(f"stopped by {signal_name} {when}; saved as {place}. {resume_hint(os.environ)}")


def not_saved(signal_name: str, step: int) -> OnwardError:
    """The end of a run that was stopped by a signal and could not be saved."""
    return OnwardError(
        f"stopped by {signal_name} at step {step}; nothing was saved, because checkpoint.checkpoints_dir is not set."
    )


def ended_by(signal_name: str, step: int, place: str | None) -> OnwardError:
    """The end of a run that a signal stopped after a step; `place` is its checkpoint, None where it has no folder."""
    return not_saved(signal_name, step) if place is None else interrupted(signal_name, f"after step {step}", place)


def resume_hint(variables: Mapping[str, str]) -> str:
    """What to type to continue this run; where a program of the user's started it, that it continues by itself.

    Args:
        variables: of the environment.
    """
    hint = GO_ON
    if Path(sys.argv[0]).name in _OWN_NAMES:
        is_torchrun = "TORCHELASTIC_RUN_ID" in variables and LAUNCHED_BY_US not in variables
        launcher = ", started by torchrun as before" if is_torchrun else ""
        hint = f"{GO_ON.rstrip('.')}{launcher}: {shlex.join(command_line())}"
    job = variables.get("SLURM_JOB_ID")
    if job is None:
        return hint
    task = variables.get("SLURM_ARRAY_TASK_ID")
    if task is not None:
        job = f"{variables.get('SLURM_ARRAY_JOB_ID', job)}_{task}"
    return f"{hint}\nTo put the Slurm job back into its queue: scontrol requeue {job}"
