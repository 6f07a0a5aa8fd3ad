"""The sections `checkpoint`, `tensorboard` and `profiler` of RUN.yaml: what a run leaves behind while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onward.parameters.field_types import STRICT, Count, CountFromZero, Flag, Positive


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
