"""The checkpoints of one run: from which it goes on, and what it saves as its parameters say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.checkpoint.reading import find_checkpoint, find_latest, read_pieces, read_record
from onward.checkpoint.writing import CheckpointWriter
from onward.engine.state import TrainState
from onward.errors import ParametersError
from onward.parallel.process import Mesh
from onward.parameters import Checkpoint, Parameters


class RunCheckpoints:
    """Loads and saves the train state of a run.

    Attributes:
        saved_update: the update that was saved last in this process; -1: none.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.saved_update = -1
        self._writer: CheckpointWriter | None = None

    def record(self, settings: Checkpoint) -> dict[str, Any] | None:
        """What stands in the checkpoint that `resume` would load, beside its tensors; None: there is none.

        Raises:
            CheckpointError: it is broken.
        """
        path = self._find(settings)
        return None if path is None else read_record(path)

    def resume(self, settings: Checkpoint, state: TrainState) -> list[str] | None:
        """Loads the run's own latest checkpoint, else the one it is to start from; notes, or None: there is none.

        Raises:
            CheckpointError: it is broken, or of another model.
        """
        path = self._find(settings)
        if path is None:
            return None
        pieces = state.pieces()
        lacking = read_pieces(path, pieces, optional=("random/",), group=self.mesh.control)
        random = {n: piece.tensor for n, piece in pieces.items() if n.startswith("random/") and n not in lacking}
        notes = state.restore(random, read_record(path))
        counters = state.counters
        where = f"round {counters.round}, step {counters.step}, {counters.update} updates done"
        return [*notes, f"resumed from {path}: {where}."]

    def _find(self, settings: Checkpoint) -> Path | None:
        asked = settings.checkpoint_to_load_path
        path = find_latest(settings.checkpoints_dir) if settings.checkpoints_dir is not None else None
        return find_checkpoint(asked) if path is None and asked is not None else path

    def open(self, settings: Checkpoint) -> CheckpointWriter:
        """The writer, made at its first use.

        Raises:
            ParametersError: parameters do not say where checkpoints go.
            StorageError: nothing can be written there.
        """
        if self._writer is None:
            if settings.checkpoints_dir is None:
                raise ParametersError("checkpoint.checkpoints_dir is not set; say where checkpoints go.")
            self._writer = CheckpointWriter(
                settings.checkpoints_dir, settings.max_num_checkpoints, settings.blocking, self.mesh.control
            )
        return self._writer

    def save(self, parameters: Parameters, state: TrainState, batch_sizes: Mapping[str, Any] | None = None) -> Path:
        """Starts a checkpoint of the present state; training may go on at once.

        Args:
            parameters: of the round.
            state: what is saved.
            batch_sizes: what was found for rounds that ask for it (`onward.engine.batch_size`).
        """
        record = {**state.record(), "parameters": parameters.to_mapping(), "batch_sizes": dict(batch_sizes or {})}
        writer = self.open(parameters.checkpoint)
        path = writer.save(state.counters.update, state.pieces(), record, state.rank_record())
        self.saved_update = state.counters.update
        return path

    def wait(self) -> None:
        """Waits until the checkpoint that was started last is complete.

        Raises:
            StorageError: it could not be written.
        """
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Waits, and lets the writer go."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
