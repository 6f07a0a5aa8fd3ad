"""The sections `checkpoint`, `tensorboard` and `profiler` of RUN.yaml: what a run leaves behind while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onward.parameters.field_types import STRICT, Count, CountFromZero, Flag, Positive
from onward.remote.files import shown, url_of


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Saving and resuming.

    Attributes:
        checkpoints_dir: folder of checkpoints; absent: none are written.
        checkpoint_period: weight updates between two checkpoints; 0: only at the end of a round.
        max_num_checkpoints: how many of the newest checkpoints are kept.
        keep_best: also save and keep the checkpoint of the round's best evaluation, by `early_stopping.metric`.
        keep_every: weight updates between two checkpoints that are kept permanently; 0: none.
        export: `last`: the trained model has the weights that training ended with; `best`: those of the best
            evaluation (with `keep_best`).
        checkpoint_to_load_path: a checkpoint, or a folder of them, from which a run starts if `checkpoints_dir` holds
            none, so that the same command resumes after an interruption.
        if_damaged: what a run does whose newest checkpoint is damaged. `refuse`: it ends with an error, and resumes
            from an earlier checkpoint only where the newest one lacks its manifest, as after an interrupted copy;
            `earlier`: it resumes from the newest undamaged one; `restart`: the same, or it starts over where there is
            none. Damaged checkpoints are renamed to `damaged-...` and kept.
        memory_period_updates: weight updates between two checkpoints in the memory of the hosts, where each node also
            keeps copies of another node's files. After a failure a run resumes from it where it is newer than the
            newest one on disk and all of its files are left. 0: none.
        memory_dir: folder in the memory of each host for those; absent: `/dev/shm`.
        blocking: wait until a checkpoint is on disk.
        on_sigusr1: what SIGUSR1 does: `save`: a checkpoint, and training continues; `stop`: the run is saved and ends
            with exit code 3, as after SIGTERM.
        grace_seconds: seconds from such a signal until whoever sent it ends the process (Slurm's KillWait, a pod's
            terminationGracePeriodSeconds, the notice of a spot machine). One process gives up accumulated steps where
            their update would come too late, and a run that needs longer to stop reports it. Absent: no deadline.
    """

    __pydantic_config__ = STRICT
    checkpoints_dir: Path | None = None
    checkpoint_period: CountFromZero = 0
    max_num_checkpoints: Count = 1
    keep_best: Flag = False
    keep_every: CountFromZero = 0
    export: Literal["last", "best"] = "last"
    checkpoint_to_load_path: Path | None = None
    if_damaged: Literal["refuse", "earlier", "restart"] = "refuse"
    memory_period_updates: CountFromZero = 0
    memory_dir: Path | None = None
    blocking: Flag = False
    on_sigusr1: Literal["save", "stop"] = "save"
    grace_seconds: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """What goes to TensorBoard, in addition to the standard scalars.

    Attributes:
        log_dir: folder of event files and of `metrics.jsonl`; absent: neither is written.
        scalar_names, histogram_names, norm_names: values of the graph, weights, or gradients (`<weight>_grad`);
            `*`-patterns match weights and gradients.
    """

    __pydantic_config__ = STRICT
    log_dir: Path | None = None
    scalar_names: tuple[str, ...] = ()
    histogram_names: tuple[str, ...] = ()
    norm_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profiler:
    """Profiling a range of steps.

    Attributes:
        first_step, last_step: steps of the round to profile, the last included, widened to entire weight updates;
            absent: none.
        trace_dir: folder of the trace and the per-node table; absent: `profile` in `output_dir`.
        top_nodes: rows of the table that are printed.
    """

    __pydantic_config__ = STRICT
    first_step: Count | None = None
    last_step: Count | None = None
    trace_dir: Path | None = None
    top_nodes: Count = 20


def checkpoint_problems(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with the section `checkpoint`, a sentence each."""
    problems = []
    if checkpoint.checkpoints_dir is None:
        names = ("checkpoint_period", "keep_best", "keep_every", "memory_period_updates")
        asked = {name: getattr(checkpoint, name) for name in names}
        problems = [
            f"checkpoint.{name} is {str(value).lower()}, but checkpoint.checkpoints_dir is missing; set where "
            "checkpoints go."
            for name, value in asked.items()
            if value
        ]
    if checkpoint.memory_dir is not None and url_of(checkpoint.memory_dir) is not None:
        problems.append(
            f"checkpoint.memory_dir is {shown(checkpoint.memory_dir)}, a URL; set it to a folder in the memory of this "
            "machine, such as /dev/shm, or leave it out."
        )
    if checkpoint.export == "best" and not checkpoint.keep_best:
        problems.append(
            "checkpoint.export is best, but checkpoint.keep_best is false, so that the best weights are not kept; set "
            "keep_best: true."
        )
    return problems
