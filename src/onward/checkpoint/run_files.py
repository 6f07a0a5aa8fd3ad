"""The remote files of a run: inputs are copied here before it starts, outputs are written here and uploaded.

The URL holds what counts: at the start the local copy is made equal to it, and every checkpoint that is complete is
uploaded at once, its manifest last. Training data are not copied: their shards are read from where they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onward.checkpoint.agreement import do_together
from onward.errors import StorageError
from onward.exclusive.lock import Locks, lock_outputs
from onward.parallel.launch.process import Mesh
from onward.parallel.rendezvous.launcher import detect
from onward.parameters import Parameters
from onward.remote.copies import fetch_folder, local_folder, local_model, place_of, upload_file
from onward.remote.files import list_folder, remove, shown, url_of

INPUT_MODELS = (
    "paths.model_path",
    "paths.eval_model_path",
    "loss.graph",
    "loss.reference_model_path",
    "distillation.teacher_path",
    "distributed.pipeline_stage_paths",
)
INPUT_FOLDERS = ("checkpoint.checkpoint_to_load_path", "adapter.start_path")
KEPT_OUTPUTS = ("checkpoint.checkpoints_dir", "tensorboard.log_dir")
"""What a run continues when it resumes: fetched at the start."""
NEW_OUTPUTS = (
    "paths.output_dir",
    "profiler.trace_dir",
    "paths.model_with_loss_func_path",
    "paths.model_with_training_graph_path",
    "paths.optimizer_graph_path",
)
READ_IN_PLACE = ("paths.train_data_dir", "paths.test_data_dir")
OF_THE_MACHINE = ("checkpoint.memory_dir",)
"""Local in any case."""
"""Every path field of the parameters is in one of these lists; a test compares them."""

LAST = "manifest.json"
"""A checkpoint is complete when this file is there."""


@dataclass(kw_only=True)
class RunFiles:
    """What of a run is remote.

    Attributes:
        models, folders: inputs, by field; URLs as paths.
        outputs: outputs, by field.
        written: all outputs of the run, local ones, too: folders, and files.
    """

    models: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    folders: Mapping[str, Path] = field(default_factory=dict)
    outputs: Mapping[str, Path] = field(default_factory=dict)
    written: tuple[tuple[Path, ...], tuple[Path, ...]] = ((), ())
    _locks: Locks = field(default_factory=Locks)
    _publishes: bool = True
    _uploaded: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: Parameters) -> RunFiles:
        """The remote paths among parameters."""
        found = {name: paths for name in _every_field() if (paths := _remote_paths(parameters, name))}
        return cls(
            models={name: found[name] for name in INPUT_MODELS if name in found},
            folders={name: found[name][0] for name in INPUT_FOLDERS if name in found},
            outputs={name: found[name][0] for name in (*KEPT_OUTPUTS, *NEW_OUTPUTS) if name in found},
            written=_written(parameters),
        )

    @property
    def is_remote(self) -> bool:
        """Whether any file of the run is remote, apart from training data."""
        return bool(self.models or self.folders or self.outputs)

    def shown(self, path: Path) -> str:
        """A path of the run as its user named it: the URL for the local copy of what is remote."""
        for target in (*self.outputs.values(), *self.folders.values()):
            place = place_of(target)
            if path == place or place in path.parents:
                return shown(target / path.relative_to(place))
        return str(path)

    def localized(self, parameters: Parameters) -> Parameters:
        """The same parameters with the local copy in place of every remote file but training data."""
        changes: dict[str, dict[str, object]] = {}
        for name in (*self.models, *self.folders, *self.outputs):
            section, _, one = name.partition(".")
            value = getattr(getattr(parameters, section), one)
            local = tuple(map(_place, value)) if isinstance(value, tuple) else _place(value)
            changes.setdefault(section, {})[one] = local
        sections = {name: dataclasses.replace(getattr(parameters, name), **fields) for name, fields in changes.items()}
        later = tuple(self.localized(one) for one in parameters.next_rounds)
        return dataclasses.replace(parameters, **sections, next_rounds=later)

    def lock_together(self, mesh: Mesh, notify: Callable[[str], None] | None = None) -> None:
        """Locks all outputs on rank 0, before anything is written; the copies of remote ones, too.

        Raises:
            FolderInUseError: another process writes to one of them; on every rank.
            StorageError: a lock file cannot be written.
        """

        def lock() -> None:
            if mesh.rank == 0:
                folders, files = self.written
                copies = [place_of(path) for path in self.outputs.values()]
                self._locks.release()
                self._locks = lock_outputs(folders, (*files, *copies), notify)

        do_together(mesh.control, lock)

    def check_locks(self) -> None:
        """Looks whether the outputs are still this run's.

        Raises:
            FolderInUseError: another process took them over.
        """
        self._locks.check()

    def release(self) -> None:
        """Lets others write to the outputs."""
        self._locks.release()

    def fetch_together(self, mesh: Mesh) -> None:
        """`fetch` by one process of each machine, the others waiting; raises as it does, on every rank."""

        def fetch() -> None:
            if detect().local_rank == 0:
                self.fetch()

        self._publishes = mesh.rank == 0
        if self.is_remote:
            do_together(mesh.control, fetch)

    def fetch(self) -> None:
        """Makes the local copies of inputs, and of outputs that a resumed run continues, equal to what is remote.

        One process of a machine calls this, before the others read.

        Raises:
            ModelError, StorageError: something cannot be fetched.
        """
        for path in {path for paths in self.models.values() for path in paths}:
            local_model(path)
        for path in self.folders.values():
            local_folder(path)
        for name, path in self.outputs.items():
            shutil.rmtree(place_of(path), ignore_errors=True)
            if name in KEPT_OUTPUTS:
                try:
                    fetch_folder(path, place_of(path))
                except FileNotFoundError:
                    continue  # the first start
                except OSError as error:
                    raise StorageError(f"{name}: {shown(path)!r} cannot be read: {error.strerror or error}.") from error
                self._note_uploaded(place_of(path))

    def publish_checkpoints(self) -> None:
        """Uploads complete checkpoints and removes remote ones that are here no more; then TensorBoard's files.

        Raises:
            StorageError: the remote file system refused.
        """
        name = "checkpoint.checkpoints_dir"
        if name in self.outputs:
            target = self.outputs[name]
            here = {path.name: path for path in sorted(place_of(target).glob("checkpoint-*"))}
            for path in here.values():
                self._upload(path, target / path.name)
            try:
                there = [one.name for one in list_folder(target) if not one.is_file]
                for old in there:
                    if old.startswith("checkpoint-") and old not in here:
                        # Without its manifest it counts no more, wherever the removal stops.
                        remove(target / old / LAST)
                        remove(target / old)
            except OSError as error:
                raise StorageError(f"{shown(target)!r}: {error.strerror or error}.") from error
        self.publish(["tensorboard.log_dir"])

    def publish_next_to_checkpoints(self, path: Path) -> None:
        """Uploads a file of the folder of checkpoints, where that is remote. Raises as `publish_checkpoints` does."""
        target = self.outputs.get("checkpoint.checkpoints_dir")
        if target is not None:
            self._upload(path, target / path.name)

    def publish(self, names: Iterable[str] | None = None) -> None:
        """Uploads outputs, as rank 0, as far as they have changed since they were uploaded last.

        Args:
            names: of fields; None: all but checkpoints.

        Raises:
            StorageError: the remote file system refused.
        """
        if not self._publishes:
            return
        chosen = [name for name in self.outputs if name != "checkpoint.checkpoints_dir"] if names is None else names
        for name in chosen:
            if name in self.outputs:
                self._upload(place_of(self.outputs[name]), self.outputs[name])

    def publish_last(self, failed: bool) -> None:
        """Uploads what is written until the end of a run, and lets others write.

        Args:
            failed: the run ends with an error, which is what its user must see, not that of this upload.

        Raises:
            StorageError: the remote file system refused, and the run has not failed.
        """
        try:
            with contextlib.suppress(*([StorageError] if failed else [])):
                self.publish(["tensorboard.log_dir", "profiler.trace_dir"])
        finally:
            self.release()

    def _upload(self, source: Path, target: Path) -> None:
        files = [source] if source.is_file() else [path for path in sorted(source.rglob("*")) if path.is_file()]
        for path in sorted(files, key=lambda path: path.name == LAST):
            status = path.stat()
            stamp = (status.st_size, status.st_mtime_ns)
            if self._uploaded.get(path) != stamp:
                upload_file(path, target / path.relative_to(source) if path != source else target)
                self._uploaded[path] = stamp

    def _note_uploaded(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                status = path.stat()
                self._uploaded[path] = (status.st_size, status.st_mtime_ns)


def localize(parameters: Parameters) -> tuple[Parameters, RunFiles]:
    """Parameters whose remote files, apart from training data, are local ones, and what is to be copied."""
    files = RunFiles.of(parameters)
    return files.localized(parameters), files


def _written(parameters: Parameters) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Folders and files that a run writes, in any of its rounds."""
    folders: dict[Path, None] = {}
    files: dict[Path, None] = {}
    for one in (parameters, *parameters.next_rounds):
        for name in (*KEPT_OUTPUTS, *NEW_OUTPUTS):
            section, _, field_name = name.partition(".")
            path = getattr(getattr(one, section), field_name)
            if path is not None:
                (folders if name.endswith("_dir") else files)[path] = None
    return tuple(folders), tuple(files)


def _every_field() -> tuple[str, ...]:
    return (*INPUT_MODELS, *INPUT_FOLDERS, *KEPT_OUTPUTS, *NEW_OUTPUTS)


def _remote_paths(parameters: Parameters, name: str) -> tuple[Path, ...]:
    section, _, one = name.partition(".")
    value = getattr(getattr(parameters, section), one)
    paths = value if isinstance(value, tuple) else (value,)
    return tuple(path for path in paths if path is not None and url_of(path) is not None)


def _place(path: Path) -> Path:
    return path if url_of(path) is None else place_of(path)
