"""A run in Weights & Biases, online or as files that `wandb sync` uploads later."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from onward.parameters import Wandb
from onward.report.trackers.tracker import Plain

EXIT_CODES = {"done": 0, "interrupted": 255, "failed": 1}
"""W&B shows 255 as killed."""


class WandbRun:
    """One run of W&B; its curves are drawn over weight updates.

    Args:
        asked: the section of RUN.yaml.
        config: the resolved parameters.
        folder: for W&B's own files; None: as W&B is configured.
        run_id: of the run to continue; None: a new one.
    """

    def __init__(self, asked: Wandb, config: Mapping[str, Any], folder: Path | None, run_id: str | None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=asked.project,
            entity=asked.entity,
            name=asked.name,
            mode=asked.mode,
            dir=None if folder is None else str(folder),
            id=run_id,
            resume=None if run_id is None else "allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        # A resumed run may have other values than the first one had: the number of steps, for instance.
        typing.cast(Any, self._run.config).update(dict(config), allow_val_change=True)
        self._run.define_metric("update", hidden=True)
        self._run.define_metric("*", step_metric="update")

    @property
    def id(self) -> str:
        """The run's id."""
        return str(self._run.id)

    def log(self, values: Mapping[str, float], update: int) -> None:
        """One row. Updates are a value like others, since W&B's own step could not go back to a checkpoint."""
        self._run.log({**values, "update": update})

    def describe(self, values: Mapping[str, Plain]) -> None:
        """Sets the run's summary."""
        self._run.summary.update(dict(values))

    def write_text(self, name: str, text: str) -> None:
        """Among the files of the run."""
        path = Path(self._run.dir) / name
        path.write_text(text, encoding="utf-8")
        self._run.save(str(path), base_path=self._run.dir, policy="now")

    def refer_to_model(self, path: str) -> None:
        """As an artifact of type `model` that holds a reference."""
        self._run.summary.update({"trained_model": path})
        artifact = wandb.Artifact(f"model-{self.id}", type="model")
        is_address = "://" in path
        artifact.add_reference(path if is_address else Path(path).resolve().as_uri(), checksum=False)
        self._run.log_artifact(artifact)

    def finish(self, status: str) -> None:
        """Ends the run."""
        self._run.finish(exit_code=EXIT_CODES[status])
