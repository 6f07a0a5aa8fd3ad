"""Events as a run would report them, each with only what a test cares about spelt out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.engine.reports import CheckpointReport, EvaluationReport, RunSummary, StepReport


def step_report(update: int = 10, **given: Any) -> StepReport:
    values: dict[str, Any] = {
        "step": update,
        "num_train_steps": 400,
        "update": update,
        "round": 0,
        "epoch": 0,
        "loss": 5.1234,
        "learning_rate": 3.2e-4,
        "gradient_norm": 1.25,
        "loss_scale": None,
        "skipped_updates": 0,
        "samples": 8 * update,
        "samples_per_second": 12_345.0,
        "tokens_per_second": None,
        "seconds": 2.0,
        "data_wait_seconds": 0.0,
        "seconds_left": 3_725.0,
    }
    return StepReport(**(values | given))


def evaluation_report(update: int = 10, metrics: Mapping[str, float] | None = None) -> EvaluationReport:
    return EvaluationReport(
        step=update,
        update=update,
        round=0,
        metrics=metrics or {"accuracy": 0.6123, "loss": 4.5},
        samples=1_797,
        seconds=2.13,
    )


def checkpoint_report(update: int = 10) -> CheckpointReport:
    return CheckpointReport(update, update, f"/somewhere/out/checkpoints/{update:08d}", 0.0312)


def run_summary(**given: Any) -> RunSummary:
    values: dict[str, Any] = {
        "round": 0,
        "steps": 400,
        "updates": 200,
        "skipped_updates": 2,
        "samples": 3_200,
        "batch_size": 8,
        "gradient_accumulation_steps": 2,
        "first_loss": 5.1234,
        "last_loss": 1.6321,
        "seconds": 3_723.2,
        "train_seconds": 3_601.1,
        "samples_per_second": 1_234.0,
        "stable_samples_per_second": 1_301.0,
        "metrics": {"loss": 1.7, "accuracy": 0.8123},
        "checkpoint": "/somewhere/out/checkpoints/00000400",
    }
    return RunSummary(**(values | given))
