"""Files sent from rank to rank over Gloo: all ranks at once, in chunks, each verified by its SHA-256 on arrival."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

import torch
import torch.distributed as dist

from onward.checkpoint.agreement import do_together
from onward.checkpoint.manifest import FileEntry
from onward.errors import CheckpointError, StorageError
from onward.untrusted_files import RefusedFile, open_regular

BUFFER_BYTES = 64 * 2**20
"""Of one rank, for the chunks of all its transfers."""
LEAST_CHUNK_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Transfer:
    """A file that one rank of a group sends to another."""

    entry: FileEntry
    source: int
    target: int


def transfer_files(group: dist.ProcessGroup | None, transfers: Sequence[Transfer], folder: Path) -> None:
    """Sends files that ranks have in `folder` into the `folder` of others; all ranks pass the same transfers.

    Every rank starts the sends and receives of one chunk of all its files before it waits for any of them, so that
    no cycle of ranks can wait for each other. A rank that cannot read or write takes part to the end.

    Raises:
        StorageError: a file could not be written; on every rank.
        CheckpointError: a file could not be read, or arrived with other bytes; on every rank.
    """
    if not transfers or group is None:
        return
    rank = dist.get_rank(group)
    counts = Counter(place for one in transfers for place in (one.source, one.target))
    chunk_bytes = max(LEAST_CHUNK_BYTES, BUFFER_BYTES // max(counts.values()))
    ends = [
        _End(one, tag, folder / one.entry.name, one.source == rank)
        for tag, one in enumerate(transfers)
        if rank in (one.source, one.target)
    ]
    for begin in range(0, max((end.transfer.entry.size_bytes for end in ends), default=0), chunk_bytes):
        started = [
            (end, data, end.start(data, group))
            for end in ends
            if (data := end.chunk(min(chunk_bytes, end.transfer.entry.size_bytes - begin))) is not None
        ]
        for end, data, work in started:
            work.wait()
            end.finish(data)

    def close() -> None:
        for end in ends:
            end.close()

    do_together(group, close)


class _End:
    """One side of a transfer: the file that is read here, or written."""

    def __init__(self, transfer: Transfer, tag: int, path: Path, is_source: bool) -> None:
        self.transfer, self._tag, self._path, self._is_source = transfer, tag, path, is_source
        self._digest = hashlib.sha256()
        self._failure: OSError | RefusedFile | None = None
        self._stream: BufferedIOBase | None = None
        try:
            self._stream = open_regular(path) if is_source else path.open("wb")
        except (OSError, RefusedFile) as error:
            self._failure = error

    def chunk(self, length: int) -> torch.Tensor | None:
        """A buffer of the next bytes: to be sent, or to be filled; None after the end of the file."""
        if length <= 0:
            return None
        data = torch.zeros(length, dtype=torch.uint8)
        if self._is_source and self._stream is not None and self._failure is None:
            try:
                self._stream.readinto(data.numpy().data)
            except OSError as error:
                self._failure = error
        return data

    def start(self, data: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Starts to send or receive a chunk."""
        one, tag = self.transfer, self._tag
        work = (
            dist.isend(data, group=group, tag=tag, group_dst=one.target)
            if self._is_source
            else dist.irecv(data, group=group, tag=tag, group_src=one.source)
        )
        assert work is not None
        return work

    def finish(self, data: torch.Tensor) -> None:
        """Writes a chunk that has arrived; once something has failed, the rest is received and dropped."""
        if self._is_source or self._stream is None or self._failure is not None:
            return
        try:
            self._digest.update(data.numpy().data)
            self._stream.write(data.numpy().data)
        except OSError as error:
            self._failure = error

    def close(self) -> None:
        """Raises StorageError or CheckpointError for what went wrong on this side."""
        try:
            if self._stream is not None:
                self._stream.close()
        except OSError as error:
            self._failure = self._failure or error
        one = self.transfer
        if self._failure is not None:
            if self._is_source:
                raise CheckpointError(f"{self._path} could not be read: {self._failure}.")
            raise StorageError(
                f"{self._path} could not be written: {self._failure}. {one.entry.size_bytes:,} bytes are needed. Free "
                "memory, or set checkpoint.memory_dir to another folder."
            )
        if not self._is_source and self._digest.hexdigest() != one.entry.sha256:
            raise CheckpointError(
                f"{self._path} arrived from rank {one.source} with the SHA-256 {self._digest.hexdigest()}, expected "
                f"{one.entry.sha256}."
            )
