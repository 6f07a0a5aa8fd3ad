"""The checkpoints of one run: from which it goes on, and what it saves as its parameters say."""

from __future__ import annotations

from pathlib import Path

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

    def resume(self, settings: Checkpoint, state: TrainState) -> list[str] | None:
        """Loads the run's own latest checkpoint, else the one it is to start from; notes, or None: there is none.

        Raises:
            CheckpointError: it is broken, or of another model.
        """
        asked = settings.checkpoint_to_load_path
        path = find_latest(settings.checkpoints_dir) if settings.checkpoints_dir is not None else None
        if path is None and asked is not None:
            path = find_checkpoint(asked)
        if path is None:
            return None
        pieces = state.pieces()
        lacking = read_pieces(path, pieces, optional=("random/",), group=self.mesh.control)
        random = {n: piece.tensor for n, piece in pieces.items() if n.startswith("random/") and n not in lacking}
        notes = state.restore(random, read_record(path))
        counters = state.counters
        where = f"round {counters.round}, step {counters.step}, {counters.update} updates done"
        return [*notes, f"resumed from {path}: {where}."]

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

    def save(self, parameters: Parameters, state: TrainState) -> Path:
        """Starts a checkpoint of the present state; training may go on at once."""
        record = {**state.record(), "parameters": parameters.to_mapping()}
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
