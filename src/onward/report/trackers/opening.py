"""Opens a run in every tracker that RUN.yaml asks for: a new one, or the one that a resumed run continues."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.report.trackers.tracker import Tracker, TrackerRun

_FIELDS = {"wandb": "project", "mlflow": "experiment", "aim": "experiment"}
"""Section, which is also the name of the package -> the field that asks for it."""


class WandbTracker(Tracker):
    """Reports to W&B."""


class MlflowTracker(Tracker):
    """Reports to MLflow."""


class AimTracker(Tracker):
    """Reports to Aim."""


_KINDS: Mapping[str, type[Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker, "aim": AimTracker}


def asked_trackers(parameters: Parameters) -> list[str]:
    """The trackers that a run reports to."""
    return [name for name, one in _FIELDS.items() if getattr(getattr(parameters, name), one) is not None]


def check_packages(parameters: Parameters) -> None:
    """Checks that the package of every tracker is installed, before any work.

    Raises:
        ParametersError: one is missing.
    """
    for name in asked_trackers(parameters):
        if importlib.util.find_spec(name) is None:
            one = _FIELDS[name]
            raise ParametersError(
                f"{name}.{one} is {getattr(getattr(parameters, name), one)!r}, but the package {name!r} is not "
                f'installed. Run pip install "onward[{name}]", or remove the section {name}.'
            )


def open_trackers(
    parameters: Parameters,
    folder: Path | None,
    texts: Mapping[str, str],
    messages: tuple[str, ...],
    state_of: Callable[[str], Mapping[str, Any]],
    notify: Callable[[str], None],
) -> Iterator[Tracker]:
    """The trackers of a run, open; one that cannot be opened is reported, and the run is not reported there.

    Args:
        parameters: of the run.
        folder: of the run, for files of a tracker.
        texts: to keep with the run, by file name.
        messages: what was reported before.
        state_of: what the checkpoint that the run continues from kept of a tracker, by its class's name.
        notify: takes sentences for the user.
    """
    for name in asked_trackers(parameters):
        kind = _KINDS[name]
        try:
            run = _open(name, parameters, folder, state_of(kind.__name__).get("id"))
            for file_name, text in texts.items():
                run.write_text(file_name, text)
        except Exception as error:
            notify(f"{name}: the run is not reported there: {type(error).__name__}: {error}")
            continue
        yield kind(run, messages)


def _open(name: str, parameters: Parameters, folder: Path | None, run_id: str | None) -> TrackerRun:
    config = parameters.to_mapping()
    if name == "wandb":
        from onward.report.trackers.wandb_run import WandbRun

        return WandbRun(parameters.wandb, config, folder, run_id)
    if name == "mlflow":
        from onward.report.trackers.mlflow_run import MlflowRun

        return MlflowRun(parameters.mlflow, config, run_id)
    from onward.report.trackers.aim_run import AimRun

    return AimRun(parameters.aim, config, run_id)
