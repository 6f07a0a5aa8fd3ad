"""W&B's own files hold what metrics.jsonl holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.trackers.runs import InterruptAt, documented, expected_points, train


def test_wandb_offline_holds_what_metrics_jsonl_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    from tests.report.trackers.wandb_files import read_run

    sections = {
        "wandb": documented("wandb"),
        "checkpoint": {"checkpoints_dir": tmp_path / "kept", "checkpoint_period": 2},
    }
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, InterruptAt(), **sections)
    records = train(tmp_path, **sections)
    wandb.teardown()
    found = [read_run(path) for path in (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")]
    run, killed = sorted(found, key=lambda run: run.exit_code or 0)
    assert killed.run_id == run.run_id
    assert (killed.exit_code, run.exit_code) == (255, 0)
    expected = expected_points(records)
    resumed_from = min(update for _, update, _ in run.points) - 1
    assert resumed_from in (2, 3, 4)
    assert {point for point in expected if point[1] > resumed_from} == run.points
    assert run.config["learning_rate"]["initial_lr"] == 0.1
    assert run.summary["trained_model"] == str(tmp_path / "out" / "mlp_trained.onnx")
