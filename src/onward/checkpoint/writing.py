"""Saving checkpoints: staged to the host, written in the background, complete or not there at all, the oldest removed
only after the new one is safe. A process killed at any moment leaves at least every checkpoint that was complete
before."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

from onward.checkpoint.manifest import Json, snapshot_record
from onward.checkpoint.reading import (
    REPLACED_PREFIX,
    checkpoint_name,
    first_failure,
    list_checkpoints,
    quiet_single_process_warning,
    sequence_of,
)
from onward.checkpoint.storage import SafetensorsStorageWriter, refuse_unstorable, sync_directory
from onward.errors import ParametersError, StorageError

TEMPORARY_PREFIX = ".tmp-"
"""Names of what is being written or removed begin with this; the next writer clears them away."""


class CheckpointWriter:
    """Saves checkpoints into one directory and keeps the newest of them.

    Only one process at a time may write into a directory. Used as a context manager it closes itself.

    Attributes:
        directory: holds `checkpoint-00000120` and so on; made if need be.
        max_num_checkpoints: how many complete ones are kept.
        blocking: `save` returns only when the checkpoint is on disk.
        stall_seconds: how long the last `save` kept its caller.
    """

    def __init__(self, directory: Path, max_num_checkpoints: int, blocking: bool = False) -> None:
        """Makes the directory and clears away what a killed process left in it.

        Raises:
            ParametersError: `max_num_checkpoints` is below 1.
            StorageError: the directory cannot be made or written to.
        """
        if max_num_checkpoints < 1:
            raise ParametersError(
                f"checkpoint.max_num_checkpoints is {max_num_checkpoints}, expected at least 1. "
                "To keep no checkpoints, leave out checkpoint.checkpoints_dir."
            )
        self.directory = directory
        self.max_num_checkpoints = max_num_checkpoints
        self.blocking = blocking
        self.stall_seconds = 0.0
        self._stager: DefaultStager | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None
        try:
            _make_directory(directory)
            _clear_leftovers(directory)
        except OSError as error:
            raise _storage_error(error, directory, 0, "prepared for checkpoints") from error

    def save(self, number: int, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Json]) -> Path:
        """Starts saving a checkpoint; the caller may change tensors and record as soon as this returns.

        Waits first for the save before it. A checkpoint of the same number is replaced as a whole.

        Args:
            number: weight updates done; names the checkpoint.
            tensors: name -> tensor of any shape and device; a name may hold any character.
            record: plain JSON values.

        Returns:
            The directory where the checkpoint will be when it is complete.

        Raises:
            StorageError: the save before this one failed (then nothing was started), or, if blocking, this one.
            TypeError, ValueError: a value, name or dtype that cannot be stored.
        """
        started = time.perf_counter()
        snapshot = snapshot_record(record)
        refuse_unstorable(tensors)
        quiet_single_process_warning()
        self.wait()
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        if self.blocking:
            self._write(number, detached, snapshot)
        else:
            self._in_flight = self._executor.submit(self._write, number, self._stage(detached), snapshot)
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
        """Waits for the save in flight and lets the host buffers go. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            if self._stager is not None:
                self._stager.close()
                self._stager = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stage(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Page-locked buffers only where they help: asking for them makes a CUDA context.
        if self._stager is None:
            pinned = any(tensor.is_cuda for tensor in tensors.values())
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=pinned,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=pinned,
                )
            )
        staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)
        return staged

    def _write(self, number: int, tensors: dict[str, torch.Tensor], record: Mapping[str, Json]) -> None:
        final = self.directory / checkpoint_name(number)
        temporary = self.directory / f"{TEMPORARY_PREFIX}{final.name}"
        # What a process killed after its last save could not remove any more. An error is told after this save.
        with suppress(StorageError):
            self._remove_oldest()
        try:
            _discard(temporary)
            checkpoints = list_checkpoints(self.directory)
            sequence = 1 + (sequence_of(checkpoints[-1]) if checkpoints else 0)
            save(tensors, storage_writer=SafetensorsStorageWriter(temporary, sequence, record), no_dist=True)
            sync_directory(temporary)
            _publish(temporary, final)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            cause = first_failure(error) if isinstance(error, CheckpointException) else error
            if isinstance(cause, OSError):
                needed_bytes = sum(tensor.nbytes for tensor in tensors.values())
                raise _storage_error(cause, final, needed_bytes, "written") from cause
            raise cause from None
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        for path in list_checkpoints(self.directory)[: -self.max_num_checkpoints]:
            try:
                _remove(path)
            except OSError as error:
                raise _storage_error(error, path, 0, "removed to make room for a newer one") from error


def _make_directory(path: Path) -> None:
    if not path.is_dir():
        if not path.parent.exists():
            _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def _publish(temporary: Path, final: Path) -> None:
    """Gives a complete checkpoint its name. Between the two renames of a replacement the old one counts still."""
    replaced = final.parent / f"{REPLACED_PREFIX}{final.name}"
    if final.exists():
        if replaced.exists():
            _remove(replaced)
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync_directory(final.parent)
    if replaced.exists():
        _remove(replaced)


def _remove(path: Path) -> None:
    """Takes the name away first, so that a checkpoint half removed is never taken for one."""
    doomed = path.parent / f"{TEMPORARY_PREFIX}removed-{path.name}"
    _discard(doomed)
    os.rename(path, doomed)
    sync_directory(path.parent)
    _discard(doomed)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clear_leftovers(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        if path.name.startswith(TEMPORARY_PREFIX):
            _discard(path)
        elif path.name.startswith(REPLACED_PREFIX):
            final = directory / path.name.removeprefix(REPLACED_PREFIX)
            if final.exists():
                _remove(path)
            else:
                os.rename(path, final)
    sync_directory(directory)


_ADVICE = {
    errno.ENOSPC: "Free some space, or name another disk in checkpoint.checkpoints_dir",
    errno.EDQUOT: "Your quota is used up: free some space, or name another disk in checkpoint.checkpoints_dir",
    errno.EROFS: "The file system is mounted read-only: name another one in checkpoint.checkpoints_dir",
    errno.EACCES: "Get the right to write there, or name another directory in checkpoint.checkpoints_dir",
    errno.EPERM: "Get the right to write there, or name another directory in checkpoint.checkpoints_dir",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or name another disk in checkpoint.checkpoints_dir",
    errno.ENOTDIR: "Name a directory in checkpoint.checkpoints_dir",
    errno.EEXIST: "Name a directory in checkpoint.checkpoints_dir",
}


def _storage_error(error: OSError, path: Path, needed_bytes: int, verb: str) -> StorageError:
    where = f" ({error.filename})" if error.filename is not None else ""
    free = _free_bytes(path)
    sizes = f" {needed_bytes:,} bytes are needed" if needed_bytes else ""
    if free is not None:
        sizes += f"{',' if sizes else ''} {free:,} bytes are free on its file system"
    advice = _ADVICE.get(error.errno or 0, "Mend the disk, or name another one in checkpoint.checkpoints_dir")
    return StorageError(
        f"{path} could not be {verb}: {error.strerror or error}{where}.{sizes}{'.' if sizes else ''} "
        f"{advice}. Checkpoints completed earlier are whole."
    )


def _free_bytes(path: Path) -> int | None:
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None
