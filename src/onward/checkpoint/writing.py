"""Saving checkpoints: staged to the host, written in the background by every rank, complete or not there at all, the
oldest removed only after the new one is safe. A process killed at any moment leaves at least every checkpoint that was
complete before."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from onward.checkpoint.agreement import rank_and_size
from onward.checkpoint.disk import TEMPORARY_PREFIX, discard, prepare_directory, publish, remove, storage_error
from onward.checkpoint.manifest import snapshot_record
from onward.checkpoint.reading import checkpoint_name, checkpoint_number, list_checkpoints, sequence_of
from onward.checkpoint.safetensors_format import refuse_unstorable
from onward.checkpoint.staging import HostCopies
from onward.errors import OnwardError, ParametersError, StorageError
from onward.parallel.messages import Json
from onward.parallel.sharded_tensors import ShardedTensor

LONGEST_WAIT = timedelta(hours=1)
"""A rank waits that long for another to write its file; longer than any disk in order takes."""


class CheckpointWriter:
    """Saves checkpoints into one directory and keeps the newest of them.

    Only one run at a time may write into a directory. Used as a context manager it closes itself. Of a run of several
    ranks every rank has a writer, and all of them call the same methods in the same order.

    Attributes:
        directory: holds `checkpoint-00000120` and so on; made if need be; on a disk that all nodes share.
        max_num_checkpoints: how many complete ones are kept.
        blocking: `save` returns only when the checkpoint is on disk.
        stall_seconds: how long the last `save` kept its caller.
        write_seconds: how long the last checkpoint took to be on the disk; 0: there was none.
        sequence: on rank 0, of the newest complete checkpoint; 0: there is none.
    """

    def __init__(
        self,
        directory: Path,
        max_num_checkpoints: int,
        blocking: bool = False,
        group: dist.ProcessGroup | None = None,
        published: Callable[[], None] | None = None,
        keep_every: int = 0,
    ) -> None:
        """Makes the directory and clears away what a killed run left in it.

        Args:
            directory, max_num_checkpoints, blocking: see the class.
            group: the ranks that save together; None: this process alone. The writer makes a Gloo group of the same
                ranks for itself, so that what it sends in the background never mixes with what training sends.
            published: called on rank 0 after a checkpoint is complete and older ones are removed.
            keep_every: checkpoints whose number is a multiple of it are never removed; 0: none.

        Raises:
            ParametersError: `max_num_checkpoints` is below 1.
            StorageError: the directory cannot be made or written to, or is not the same one for all ranks.
        """
        if max_num_checkpoints < 1:
            raise ParametersError(
                f"checkpoint.max_num_checkpoints is {max_num_checkpoints}, expected at least 1. "
                "To keep no checkpoints, leave out checkpoint.checkpoints_dir."
            )
        self.directory = directory
        self.max_num_checkpoints = max_num_checkpoints
        self.blocking = blocking
        self.keep_every = keep_every
        self.stall_seconds = self.write_seconds = 0.0
        self._copies = HostCopies()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None
        self._published = published
        self._group = None if group is None else _own_group(group)
        self.sequence = 0
        self._prepare()

    def _prepare(self) -> None:
        prepare_directory(self.directory, self._group)
        if rank_and_size(self._group)[0] == 0:
            self.sequence = self._newest_sequence()

    def save(
        self,
        number: int,
        tensors: Mapping[str, ShardedTensor | torch.Tensor],
        record: Mapping[str, Json],
        rank_record: Mapping[str, Json] | None = None,
        best: int | None = None,
    ) -> Path:
        """Starts saving a checkpoint; the caller may change tensors and records as soon as this returns.

        Waits first for the save before it. A checkpoint of the same number is replaced in full.

        Args:
            number: weight updates done; names the checkpoint.
            tensors: name -> this rank's shards, of any shape and device; a plain tensor is a full one. A name may hold
                any character. Ranks may hold different names.
            record: plain JSON values; rank 0's are stored.
            rank_record: plain JSON values of this rank, stored as `record["ranks"][str(rank)]`.
            best: number of a checkpoint that is kept, in addition to the newest; those kept before as the best are
                removed.

        Returns:
            The directory where the checkpoint will be when it is complete.

        Raises:
            StorageError: the save before this one failed on some rank (then nothing was started), or, if blocking,
                this one; on every rank, with the cause and the rank where it arose.
            TypeError, ValueError: a value, name or dtype that cannot be stored.
        """
        started = time.perf_counter()
        snapshot = snapshot_record(record)
        rank_snapshot = None if rank_record is None else snapshot_record(rank_record)
        given = tensors.items()
        held = {name: one if isinstance(one, ShardedTensor) else ShardedTensor.full(one) for name, one in given}
        refuse_unstorable({name: sharded.tensor for name, sharded in held.items()})
        self.wait()
        written = {name: sharded for name, sharded in held.items() if sharded.is_written and sharded.shards}
        own = {name: sharded.tensor.detach() for name, sharded in written.items()}
        if not self.blocking:
            own = self._copies.take(own)
        saved = {name: replace(written[name], tensor=own[name]) for name in written}
        arguments = (number, saved, tuple(held), snapshot, rank_snapshot, best)
        if self.blocking:
            self._write(*arguments)
        else:
            self._in_flight = self._executor.submit(self._write, *arguments)
        self.stall_seconds = time.perf_counter() - started
        return self.directory / checkpoint_name(number)

    def wait(self) -> None:
        """Waits until the save in flight is complete.

        Raises:
            StorageError: it failed; raised once, after which the writer can be used again.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def close(self) -> None:
        """Waits for the save in flight and lets the host buffers and the group go. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            self._copies = HostCopies()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(
        self,
        number: int,
        tensors: Mapping[str, ShardedTensor],
        names: tuple[str, ...],
        record: Mapping[str, Json],
        rank_record: Mapping[str, Json] | None,
        best: int | None,
    ) -> None:
        # torch.distributed.checkpoint takes half a second to import, here beside training.
        from onward.checkpoint.collective_save import save_together
        from onward.checkpoint.storage import Publication

        final = self.directory / checkpoint_name(number)
        temporary = self.directory / f"{TEMPORARY_PREFIX}{final.name}"

        def begin() -> int:
            # What a process killed after its last save could not remove any more. An error is reported after this save.
            # The best one so far is removed only after a better one is safe.
            with suppress(StorageError):
                if best is None:
                    self._remove_oldest(None)
            discard(temporary)
            return 1 + self._newest_sequence()

        def complete() -> None:
            publish(temporary, final)
            self.sequence = sequence_of(final)
            self._remove_oldest(best)
            if self._published is not None:
                self._published()

        publication = Publication(temporary=temporary, final=final, begin=begin, complete=complete)
        started = time.perf_counter()
        try:
            save_together(tensors, names, publication, record, rank_record, self._group)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise explained(error, final, self._group) from None
        self.write_seconds = time.perf_counter() - started

    def _newest_sequence(self) -> int:
        checkpoints = list_checkpoints(self.directory)
        return sequence_of(checkpoints[-1]) if checkpoints else 0

    def _remove_oldest(self, best: int | None) -> None:
        for path in list_checkpoints(self.directory)[: -self.max_num_checkpoints]:
            number = checkpoint_number(path)
            if number == best or (self.keep_every and number % self.keep_every == 0):
                continue
            try:
                remove(path)
            except OSError as error:
                raise storage_error(error, path, 0, "removed to make room for a newer one") from error


def _own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another Gloo group of the same ranks; only they need to call this."""
    own = dist.new_group(
        dist.get_process_group_ranks(group),
        LONGEST_WAIT,
        "gloo",
        use_local_synchronization=True,
        group_desc="checkpoint",
    )
    assert isinstance(own, dist.ProcessGroup)
    return own


def explained(error: BaseException, final: Path, group: dist.ProcessGroup | None) -> BaseException:
    """What really went wrong, with the rank where it did; the same on every rank."""
    if type(error) is OnwardError and group is not None:
        return OnwardError(f"{final} could not be written: {error}")
    if isinstance(error, RuntimeError) and group is not None:
        rank, size = rank_and_size(group)
        return OnwardError(
            f"{final} could not be written: one of the {size} ranks ended or stopped responding in the meantime (seen "
            f"on rank {rank}: {error}). Checkpoints completed earlier are intact."
        )
    return error
