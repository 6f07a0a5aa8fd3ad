"""Writing a shard file: complete and on the disk, or not there at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from onward.data.shard_format import checksum_text, encode_sample, new_checksum
from onward.errors import StorageError
from onward.exclusive.temporary import temporary_path


class ShardWriter:
    """Writes one shard file that appears under its name only when it is complete and on the disk.

    Use as a context manager. Samples go to a hidden temporary file next to the destination, which is renamed at the end
    and removed if the block raises.

    Attributes:
        path: the destination; an existing file is replaced at the end.
        sample_count, byte_count: written so far.
        checksum: of the bytes written so far (`new_checksum`).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.sample_count = 0
        self.byte_count = 0
        self._checksum = new_checksum()
        self._temporary = temporary_path(self.path)
        try:
            self._file = open(self._temporary, "wb", buffering=1 << 20)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise StorageError(f"cannot write shard {str(self.path)!r}: {error.strerror or error}.") from error

    def write(self, features: Mapping[str, np.ndarray]) -> None:
        """Appends one sample (features without a batch axis).

        Raises:
            DataError: as `encode_sample`.
            StorageError: the disk refused the bytes.
        """
        encoded = encode_sample(features)
        try:
            self._file.write(encoded)
        except OSError as error:
            raise self._storage_error(error) from error
        self._checksum.update(encoded)
        self.byte_count += len(encoded)
        self.sample_count += 1

    @property
    def checksum(self) -> str:
        """Of the bytes written so far, as `pack.json` lists it."""
        return checksum_text(self._checksum)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.publish()
        else:
            self.discard()

    def publish(self) -> None:
        """Ends the file: on the disk, under its name. `__exit__` does this.

        Raises:
            StorageError: the disk refused it; nothing is left.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._storage_error(error) from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Removes the temporary file; `__exit__` does this when the block raised."""
        # Where the buffered rest cannot be written either, the first refusal is already being raised.
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _storage_error(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot write shard {str(self.path)!r} after {self.sample_count} samples ({self.byte_count} bytes): "
            f"{error.strerror or error}. Nothing was left under that name; free space and write it again."
        )
