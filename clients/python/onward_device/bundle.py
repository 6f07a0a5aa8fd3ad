"""A device bundle on disk: its manifest, checked, and the first values of its state."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

FORMAT = "onward-device"
VERSION = 1
KNOWN = frozenset({"accumulation", "class_labels", "table_rows", "weights_inside"})
"""What bundles may require of a client."""

Array = np.ndarray[Any, np.dtype[Any]]


class BundleError(ValueError):
    """A bundle, a state or a batch that does not fit, with what was expected and what to do."""


@dataclass(frozen=True)
class Bundle:
    """A folder that `onward device` wrote.

    Attributes:
        folder: where it is.
        manifest: the content of `manifest.json`.
    """

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path, verify: bool = True) -> Bundle:
        """Reads the manifest of a folder.

        Args:
            folder: of the bundle.
            verify: compare the checksum of every file.

        Raises:
            BundleError: it is no bundle of this version, requires what this package does not know, or a file was
                changed.
        """
        folder = Path(folder)
        path = folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BundleError(
                f"{folder} is no device bundle: it has no manifest.json. Write one with "
                "`onward device RUN.yaml -o DIR`."
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BundleError(f"{path} is no JSON: {error}. Write the bundle again.") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise BundleError(f"{path} is no manifest of a device bundle; expected the format {FORMAT!r}.")
        if manifest.get("version") != VERSION:
            raise BundleError(
                f"{folder} is a device bundle of version {manifest.get('version')}; this package reads version "
                f"{VERSION}. Install the onward-device of the onward that wrote it ({manifest.get('written_by')})."
            )
        unknown = sorted(map(str, set(manifest.get("requires", ())) - KNOWN))
        if unknown:
            raise BundleError(
                f"{folder} is a device bundle that requires {', '.join(unknown)}, which this package does not know. "
                f"Install the onward-device of the onward that wrote it ({manifest.get('written_by')})."
            )
        bundle = cls(folder, manifest)
        if verify:
            bundle.verify()
        return bundle

    def verify(self) -> None:
        """Compares the checksum of every file with the manifest.

        Raises:
            BundleError: a file is missing or was changed.
        """
        for name, expected in self.manifest["files"].items():
            digest = hashlib.sha256()
            try:
                with (self.folder / name).open("rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
            except FileNotFoundError:
                raise BundleError(
                    f"{self.folder} has no file {name}. Copy the bundle again, all files of it."
                ) from None
            if digest.hexdigest() != expected:
                raise BundleError(
                    f"{self.folder / name} was changed or damaged: its SHA-256 is {digest.hexdigest()}, the manifest "
                    f"has {expected}. Copy the bundle again."
                )

    @property
    def identity(self) -> str:
        """What tells bundles apart: a hash of all files and of the layout of the state."""
        return str(self.manifest["identity"])

    def path_of(self, graph: str) -> Path:
        """The file of a graph."""
        return self.folder / str(self.manifest["graphs"][graph]["file"])

    def first_state(self) -> dict[str, Array]:
        """The state before the first step, by name."""
        found: dict[str, Array] = {}
        with ExitStack() as opened:
            files: dict[str, BinaryIO] = {}
            for one in self.manifest["state"]:
                start, shape, dtype = one["start"], tuple(one["shape"]), np.dtype(one["dtype"])
                if "file" not in start:
                    found[one["name"]] = np.full(shape, start["value"], dtype)
                    continue
                name = Path(start["file"]).name
                if name not in files:
                    files[name] = opened.enter_context((self.folder / name).open("rb"))
                files[name].seek(start["offset"])
                found[one["name"]] = np.frombuffer(files[name].read(start["length"]), dtype).reshape(shape).copy()
        return found

    def check_state(self, state: dict[str, Array], source: str) -> None:
        """Compares names, shapes and types with those of this bundle.

        Raises:
            BundleError: one differs.
        """
        expected = {one["name"]: one for one in self.manifest["state"]}
        other = sorted(expected.keys() ^ state.keys())
        if other:
            raise BundleError(
                f"{source} is no state of this bundle: {', '.join(other[:5])} {'is' if len(other) == 1 else 'are'} in "
                "one of the two alone. Use the bundle that the state was trained with."
            )
        for name, array in state.items():
            shape, dtype = tuple(expected[name]["shape"]), expected[name]["dtype"]
            if array.shape != shape or array.dtype != np.dtype(dtype):
                raise BundleError(
                    f"{source} is no state of this bundle: {name!r} is {array.dtype} {list(array.shape)}; expected "
                    f"{dtype} {list(shape)}. Use the bundle that the state was trained with."
                )
