"""A run in MLflow: on a server, or in a database or folder of this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from onward.parameters import Mlflow
from onward.report.trackers.tracker import Plain, flat

STATUSES = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
PARAMS_AT_ONCE = 100
"""MLflow takes no more in one call."""

LONGEST_PARAM = 500
"""Characters that every version and store of MLflow takes; the file `resolved.yaml` of the run holds them in full."""


class MlflowRun:
    """One run of MLflow; its steps are weight updates.

    Args:
        asked: the section of RUN.yaml.
        config: the resolved parameters. Those of a run that continues stay what they were, since MLflow changes none.
        run_id: of the run to continue; None: a new one.
    """

    def __init__(self, asked: Mlflow, config: Mapping[str, Any], run_id: str | None) -> None:
        self._client = MlflowClient(tracking_uri=asked.tracking_uri)
        if run_id is None:
            found = self._client.get_experiment_by_name(str(asked.experiment))
            where = self._client.create_experiment(str(asked.experiment)) if found is None else found.experiment_id
            self.id = str(self._client.create_run(where, run_name=asked.name).info.run_id)
        else:
            self.id = run_id
            self._client.update_run(run_id, status="RUNNING")
        present = self._client.get_run(self.id).data.params
        texts = {name: str(value)[:LONGEST_PARAM] for name, value in flat(config).items() if name not in present}
        params = [Param(name, text) for name, text in texts.items()]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self.id, params=params[first : first + PARAMS_AT_ONCE])

    def log(self, values: Mapping[str, float], update: int) -> None:
        """One call for all values."""
        now = int(time.time() * 1000)
        self._client.log_batch(self.id, metrics=[Metric(name, value, now, update) for name, value in values.items()])

    def describe(self, values: Mapping[str, Plain]) -> None:
        """Sets tags."""
        for name, value in values.items():
            self._client.set_tag(self.id, name, str(value))

    def write_text(self, name: str, text: str) -> None:
        """As an artifact."""
        self._client.log_text(self.id, text, name)

    def refer_to_model(self, path: str) -> None:
        """As a tag."""
        self._client.set_tag(self.id, "trained_model", path)

    def finish(self, status: str) -> None:
        """Ends the run."""
        self._client.set_terminated(self.id, STATUSES[status])
