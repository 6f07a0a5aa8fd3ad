"""Every exception that onward raises on purpose, on one page.

    OnwardError
    ├── UserError             the user can fix it; the command line exits with 2
    │   ├── ParametersError       a field of RUN.yaml or of `Parameters`
    │   ├── ModelError            the ONNX file, its graph or its weights
    │   │   ├── OperatorError         operators that cannot be lowered, all of them at once
    │   │   └── NodeError             one node that failed while it ran, with its ONNX name
    │   ├── DataError             a data file, a feature, a label
    │   ├── CheckpointError       a checkpoint that is missing, broken or of another model
    │   ├── StorageError          the disk: full, read-only, gone
    │   └── FolderInUseError      another process writes where this one is to write
    ├── CorruptionError       memory or a processor that changed bits; the command line exits with 1
    ├── OutOfMemoryError      memory ran out while training
    └── Interrupted           stopped by a signal after saving; the command line exits with 3

A message says what is wrong with names and numbers, what was expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator


class OnwardError(Exception):
    """Root of the tree."""


class UserError(OnwardError, ValueError):
    """Something the user can fix."""


class ParametersError(UserError):
    """A field that is unknown, of the wrong type, or impossible in combination with another."""


class ModelError(UserError):
    """An ONNX model that cannot be read, checked, trained or written."""


class OperatorError(ModelError):
    """Operators of a model that cannot be lowered, all of them, with node names."""


class NodeError(ModelError):
    """A node that failed while it ran; the cause is chained."""


class DataError(UserError):
    """Training or evaluation data that are missing, broken or do not fit the model."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, broken or of another model."""


class OtherTensorsError(CheckpointError):
    """A checkpoint whose tensors are not those of the run: of another model, or of other choices for it.

    Args:
        path: of the checkpoint.
        differences: a sentence.
    """

    def __init__(self, path: str, differences: str) -> None:
        self.path, self.differences = path, differences
        super().__init__(
            f"{path} is a checkpoint of another model, or of another optimizer. {differences} Load it with the model "
            "and optimizer it was saved with, or name another checkpoint."
        )

    def because_of(self, changes: str) -> CheckpointError:
        """The same, where the fields that were changed since the checkpoint are known."""
        return CheckpointError(
            f"{self.path} holds other tensors than this run has, since fields were changed: {changes}. "
            f"{self.differences} Set the fields back to resume. To start from the checkpoint's weights with the new "
            f"fields, export them (onward export MODEL --checkpoint {self.path} -o START.onnx), and train that file "
            "with another checkpoint.checkpoints_dir."
        )


class StorageError(UserError):
    """A file system that refused to store what onward wrote."""


class FolderInUseError(UserError):
    """An output folder or file that another process is writing to."""


class CorruptionError(OnwardError):
    """Bits that must be equal and are not: nothing that the user did, and nothing to save."""


class OutOfMemoryError(OnwardError):
    """Memory ran out in a training step; the cause is chained."""

    def __init__(self, message: str, batch_size: int) -> None:
        super().__init__(message)
        self.batch_size = batch_size


class Interrupted(OnwardError):
    """A signal ended the run after its state was saved."""


def chain_of(error: BaseException | None, *, only_causes: bool = False) -> Iterator[BaseException]:
    """An exception, what it was raised from or while handling, and so on; each once, since chains may be circles."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ if only_causes else error.__cause__ or error.__context__


class NoteWarning(UserWarning):
    """Something that a user should know; the command line reports it as a note."""


class RenamedField(FutureWarning):
    """A field was set by its old name; the command line reports it as a note."""
