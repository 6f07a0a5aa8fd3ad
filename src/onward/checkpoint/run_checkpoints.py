"""The checkpoints of one run: from which it resumes, and what it saves as its parameters say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from onward.checkpoint.agreement import do_together, gather_from_all
from onward.checkpoint.memory.run_memory import RunMemory
from onward.checkpoint.reading import (
    checkpoint_number,
    find_checkpoint,
    list_checkpoints,
    read_sharded_tensors,
    sequence_of,
)
from onward.checkpoint.resuming import choose_checkpoint
from onward.checkpoint.run_files import RunFiles
from onward.checkpoint.run_record import read_run_record
from onward.checkpoint.writing import CheckpointWriter
from onward.engine.faults.integrity import StateDigests
from onward.engine.faults.loss_spikes import RollBack
from onward.engine.state import TrainState
from onward.errors import CheckpointError, CorruptionError, OnwardError, ParametersError, StorageError
from onward.graph.adapters.base_checksum import why_other_base
from onward.parallel.launch.process import Mesh
from onward.parameters import Checkpoint, Parameters

_OF_LAYOUTS = ("random/", "average/", "pruned/", "outer/", "workers/")
"""Beginnings of the names of tensors that a checkpoint may lack, or have in addition."""

GO_ON = "The same command resumes from there."


def can_save(settings: Checkpoint, step: int, notify: Callable[[str], None]) -> bool:
    """Whether the checkpoint that SIGUSR1 asks for can be saved; `notify` is called either way."""
    is_possible = settings.checkpoints_dir is not None
    notify(
        f"SIGUSR1 at step {step}: saving a checkpoint; training continues."
        if is_possible
        else f"SIGUSR1 at step {step}: nothing is saved, because checkpoint.checkpoints_dir is not set. Set it to the "
        "folder of the checkpoints; training continues."
    )
    return is_possible


class RunCheckpoints:
    """Loads and saves the train state of a run.

    Making it locks what the run writes and fetches what of it is remote, on all ranks together.

    Attributes:
        saved_update: the update that was saved last in this process; -1: none.
        base_checksum: of the frozen model, where adapters are trained; else "".
    """

    def __init__(self, mesh: Mesh, files: RunFiles | None = None, notify: Callable[[str], None] | None = None) -> None:
        self.mesh = mesh
        self._files = RunFiles() if files is None else files
        self._files.lock_together(mesh, notify)
        self._files.fetch_together(mesh)
        self.saved_update = -1
        self.base_checksum = ""
        self._writer: CheckpointWriter | None = None
        self._memory: RunMemory | None = None
        self._digests: StateDigests | None = None
        self._chosen: tuple[Path, Path | None] | None = None
        self._notify = notify or (lambda text: None)

    def record(self, settings: Checkpoint) -> dict[str, Any] | None:
        """What is in the checkpoint that `resume` would load, in addition to its tensors; None: there is none.

        Raises:
            CheckpointError: it is broken.
        """
        path = self._find(settings)
        return None if path is None else read_run_record(path)

    def resume(self, settings: Checkpoint, state: TrainState) -> list[str] | None:
        """Loads the run's own latest checkpoint, else the one it is to start from; notes, or None: there is none.

        Raises:
            CheckpointError: it is broken, or of another model.
        """
        path = self._find(settings)
        return None if path is None else self._load(path, state)

    def roll_back(
        self, settings: Checkpoint, state: TrainState, spike: RollBack, restore: Callable[[Mapping[str, Any]], None]
    ) -> Path:
        """Loads the newest checkpoint before a spike; what is left out of the data stays as it is in `state`.

        Args:
            settings: where checkpoints are.
            state: takes over the checkpoint.
            spike: the update that was one.
            restore: takes over what callbacks keep.

        Raises:
            CheckpointError: there is none, or it is broken.
        """
        self.wait()
        folder = settings.checkpoints_dir

        def choose() -> str:
            if folder is None or self.mesh.rank:
                return ""
            earlier = (p for p in list_checkpoints(folder) if checkpoint_number(p) < spike.update)
            return str(max(earlier, key=sequence_of))

        path = Path(gather_from_all(self.mesh.control, do_together(self.mesh.control, choose))[0])
        course = state.course
        self.clear_memory()  # of updates that are undone
        state.drop_gradients()
        self._load(path, state)
        state.course.spans, state.course.rollbacks = course.spans, course.rollbacks
        restore(read_run_record(path).get("callbacks", {}))
        self._notify(f"{spike.text}; returned to {self._files.shown(path)}, and these data are left out.")
        return path

    def _load(self, path: Path, state: TrainState) -> list[str]:
        record = read_run_record(path)
        if why := why_other_base(record.get("base_checksum", ""), self.base_checksum):
            raise CheckpointError(f"{self._files.shown(path)} cannot be loaded: {why}")
        local, memory = state.local_sgd, self._memory
        tensors = state.sharded_tensors(local is None or local.is_of_same_workers(record))
        if memory is not None and memory.chosen is not None:
            lacking, place = memory.read(tensors, _OF_LAYOUTS), memory.place
        else:
            lacking = read_sharded_tensors(path, tensors, optional=_OF_LAYOUTS, group=self.mesh.control)
            place = self._files.shown(path)
        random = {n: sharded.tensor for n, sharded in tensors.items() if n.startswith("random/") and n not in lacking}
        notes = state.restore(random, record)
        counters = state.counters
        where = f"round {counters.round}, step {counters.step}, {counters.update} updates done"
        return [*notes, f"resumed from {place}: {where}."]

    def _find(self, settings: Checkpoint) -> Path | None:
        """The checkpoint to resume from. The run's own folder is looked at once, by rank 0."""
        asked, folder = settings.checkpoint_to_load_path, settings.checkpoints_dir
        if folder is not None and (self._chosen is None or self._chosen[0] != folder):

            def choose() -> tuple[Path | None, list[str]]:
                return choose_checkpoint(folder, settings.if_damaged) if self.mesh.rank == 0 else (None, [])

            chosen, notes = do_together(self.mesh.control, choose)
            place = gather_from_all(self.mesh.control, None if chosen is None else str(chosen))[0]
            self._chosen = (folder, None if place is None else Path(place))
            for note in notes if self.mesh.rank == 0 else ():
                self._notify(note)
            if settings.memory_period_updates:
                self._memory = RunMemory(settings, self.mesh, self._files)
                self._chosen = (folder, self._memory.find(self._chosen[1], self._notify) or self._chosen[1])
        path = None if folder is None or self._chosen is None else self._chosen[1]
        return find_checkpoint(asked) if path is None and asked is not None else path

    def open(self, settings: Checkpoint) -> CheckpointWriter:
        """The writer, made at its first use.

        Raises:
            ParametersError: parameters do not say where checkpoints go.
            StorageError: nothing can be written there.
        """
        if self._writer is None:
            if settings.checkpoints_dir is None:
                raise ParametersError("checkpoint.checkpoints_dir is not set; set it to the folder for checkpoints.")
            self._writer = CheckpointWriter(
                settings.checkpoints_dir,
                settings.max_num_checkpoints,
                settings.blocking,
                self.mesh.control,
                self._files.publish_checkpoints if self._files.is_remote else None,
                settings.keep_every,
            )
        return self._writer

    def save(
        self,
        parameters: Parameters,
        state: TrainState,
        batch_sizes: Mapping[str, Any] | None = None,
        callbacks: Mapping[str, Any] | None = None,
        best_update: int | None = None,
    ) -> Path:
        """Starts a checkpoint of the present state; training may continue at once.

        Args:
            parameters: of the round.
            state: what is saved.
            batch_sizes: what is known of micro-batches (`onward.engine.forecast.batch_size`).
            callbacks: what callbacks keep, by name.
            best_update: of the checkpoint that is kept as the best.

        Raises:
            CorruptionError: replicas hold different bits; nothing is saved.
        """
        record = self._record_of(parameters, state, batch_sizes, callbacks)
        writer = self.open(parameters.checkpoint)
        path = writer.save(state.counters.update, state.sharded_tensors(), record, state.rank_record(), best_update)
        self.saved_update = state.counters.update
        return path

    def open_memory(self, state: TrainState) -> None:
        """Readies the memory of the hosts, where the run keeps checkpoints in it.

        Raises:
            StorageError: a node has too little; with numbers.
        """
        if self._memory is not None:
            self._memory.open(state.sharded_tensors())

    def save_in_memory(
        self,
        parameters: Parameters,
        state: TrainState,
        batch_sizes: Mapping[str, Any] | None = None,
        callbacks: Mapping[str, Any] | None = None,
    ) -> None:
        """`save` in the memory of the hosts; a failure of memory is reported, and ends nothing. Raises as it does."""
        if self._memory is None:
            return
        record = self._record_of(parameters, state, batch_sizes, callbacks)
        sequence, tensors = self.open(parameters.checkpoint).sequence, state.sharded_tensors()
        note = self._memory.save(state.counters.update, tensors, record, state.rank_record(), sequence)
        if note is not None and self.mesh.rank == 0:
            self._notify(note)

    def clear_memory(self) -> None:
        """Removes the checkpoints in memory, once the one on disk is as new; on all ranks together."""
        if self._memory is not None:
            self._memory.clear()

    def _record_of(
        self,
        parameters: Parameters,
        state: TrainState,
        batch_sizes: Mapping[str, Any] | None,
        callbacks: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        self._files.check_locks()
        if parameters.machine.check_weights_period and self.mesh.world_size > 1:
            self._digests = self._digests or StateDigests(state, parameters.machine.deterministic)
            self._digests.check()
        return {
            **state.record(),
            "parameters": parameters.to_mapping(),
            **({"base_checksum": self.base_checksum} if self.base_checksum else {}),
            **(batch_sizes or {}),
            "callbacks": dict(callbacks or {}),
        }

    @contextlib.contextmanager
    def saving_after_failure(self, settings: Checkpoint, state: TrainState, save: Callable[[], Path]) -> Iterator[None]:
        """Whatever fails between two updates, a broken file or a full memory, costs no more than those steps.

        Args:
            settings: where checkpoints go, if anywhere.
            state: what is returned to the last update.
            save: starts a checkpoint.
        """
        state.mark()
        begin = state.counters.update
        try:
            yield
        except BaseException as error:
            if self.mesh.world_size > 1:
                raise  # the others are in another place; what is saved is saved
            saves = False
            if isinstance(error, Exception):
                if state.is_torn:
                    error.add_note(
                        "The failed step had updated some of the weights inside its backward pass "
                        "(speed.update_in_backward), so that nothing was saved; the last checkpoint is unaffected."
                    )
                    raise
                state.return_to_mark()
                is_new = state.counters.update > max(begin, self.saved_update)
                is_lost = isinstance(error, StorageError | CorruptionError | RollBack)
                saves = settings.checkpoints_dir is not None and is_new and not is_lost
            try:
                path = save() if saves else None
                self.wait()  # whoever catches this may go on in this process, from the checkpoint being written
            except OnwardError as second:
                error.add_note(f"The steps before could not be saved: {second}")
            else:
                if path is not None:
                    place = self._files.shown(path)
                    error.add_note(f"The steps before, to step {state.counters.step}, are saved as {place}. {GO_ON}")
            raise

    @property
    def save_seconds(self) -> float:
        """How long the last checkpoint took to be on the disk; 0: there was none."""
        return 0.0 if self._writer is None else self._writer.write_seconds

    def wait(self) -> None:
        """Waits until the checkpoint that was started last is complete.

        Raises:
            StorageError: it could not be written.
        """
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Waits, and lets the writer go. What is written now is the trained model, if the outputs are still ours."""
        self._files.check_locks()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
