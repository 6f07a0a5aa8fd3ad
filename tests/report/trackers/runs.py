"""Runs of a small network that report to trackers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.callbacks import Callback
from onward.engine.reports import UpdateReport
from onward.report.trackers.tracker import STEP_FIELDS
from tests.mlp import data, start


class InterruptAt(Callback):
    """Ends the run as Ctrl-C does, after a checkpoint."""

    def on_update(self, report: UpdateReport) -> None:
        if report.update == 4:
            raise KeyboardInterrupt


def train(folder: Path, *watchers: Any, **sections: Any) -> list[dict[str, Any]]:
    """Trains 8 steps with two evaluations; the records of metrics.jsonl."""
    places = {
        "paths": {"output_dir": folder / "out"},
        "tensorboard": {"log_dir": folder / "tb"},
        "training": {"evaluation_period": 4},
    }
    runner, _ = start(folder, *watchers, **places, **sections)
    test = InMemoryDataLoader(data(8))
    try:
        runner.run(InMemoryDataLoader(data(32)), test)
        runner.end_training(test)
    finally:
        runner.watchers.close()
    return [json.loads(line) for line in (folder / "tb" / "metrics.jsonl").read_text().splitlines()]


def documented(section: str) -> dict[str, Any]:
    """The section of a tracker as docs/howto/watching.md shows it."""
    page = (Path(__file__).parents[3] / "docs" / "howto" / "watching.md").read_text()
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL) if b.startswith("wandb:")]
    found: dict[str, Any] = yaml.safe_load(block)[section]
    return found


def expected_points(records: list[dict[str, Any]]) -> set[tuple[str, int, float]]:
    points = set()
    for record in records:
        if record["kind"] == "step":
            found = {f"train/{name}": record[name] for name in STEP_FIELDS}
        elif record["kind"] == "evaluation":
            found = {f"test/{name}": value for name, value in record["metrics"].items()}
        else:
            continue
        points |= {(name, record["update"], float(value)) for name, value in found.items() if value is not None}
    return points
