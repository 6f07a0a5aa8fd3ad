"""MLflow holds what metrics.jsonl holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report.trackers.runs import InterruptAt, documented, expected_points, train


def test_mlflow_holds_what_metrics_jsonl_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow or mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    uri = (tmp_path / "mlruns").as_uri()
    sections = {
        "mlflow": {**documented("mlflow"), "tracking_uri": uri},
        "checkpoint": {"checkpoints_dir": tmp_path / "kept", "checkpoint_period": 2},
    }
    client = mlflow.MlflowClient(tracking_uri=uri)

    def only_run() -> Any:
        (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
        return run

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, InterruptAt(), **sections)
    assert only_run().info.status == "KILLED"
    records = train(tmp_path, **sections)
    run = only_run()
    names = run.data.metrics
    points = {(n, p.step, p.value) for n in names for p in client.get_metric_history(run.info.run_id, n)}
    assert points >= expected_points(records)
    assert {(n, u) for n, u, _ in points} == {(n, u) for n, u, _ in expected_points(records)}
    assert run.info.status == "FINISHED"
    assert run.data.params["learning_rate.initial_lr"] == "0.1"
    assert run.data.tags["trained_model"] == str(tmp_path / "out" / "mlp_trained.onnx")
    assert {one.path for one in client.list_artifacts(run.info.run_id)} == {
        "messages.txt", "resolved.yaml", "run.json",
    }  # fmt: skip
