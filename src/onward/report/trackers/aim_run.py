"""A run in Aim: in a folder of this machine, or on an Aim server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aim

from onward.parameters import Aim
from onward.report.trackers.tracker import Plain


class AimRun:
    """One run of Aim; its steps are weight updates, `train` and `test` are the context of a metric.

    Args:
        asked: the section of RUN.yaml.
        config: the resolved parameters.
        run_id: of the run to continue; None: a new one.
    """

    def __init__(self, asked: Aim, config: Mapping[str, Any], run_id: str | None) -> None:
        self._run = aim.Run(
            run_hash=run_id,
            repo=asked.repo,
            experiment=asked.experiment,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        if asked.name is not None:
            self._run.name = asked.name
        self._run["parameters"] = dict(config)

    @property
    def id(self) -> str:
        """The run's hash."""
        return str(self._run.hash)

    def log(self, values: Mapping[str, float], update: int) -> None:
        """One call for each value."""
        for name, value in values.items():
            subset, _, metric = name.partition("/")
            self._run.track(value, name=metric, step=update, context={"subset": subset})

    def describe(self, values: Mapping[str, Plain]) -> None:
        """Sets attributes of the run."""
        for name, value in values.items():
            self._run[name] = value

    def write_text(self, name: str, text: str) -> None:
        """As an attribute, by the name of the file."""
        self._run[name] = text

    def refer_to_model(self, path: str) -> None:
        """As an attribute."""
        self._run["trained_model"] = path

    def finish(self, status: str) -> None:
        """Ends the run; Aim has no status of its own."""
        self._run["status"] = status
        self._run.close()
