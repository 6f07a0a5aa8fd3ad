"""`pack.json`, the list of contents beside packed shards, by which a loader notices that samples were lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onward.errors import DataError
from onward.remote.files import read_text, shown

MANIFEST_NAME = "pack.json"
_FORMAT = "onward-pack"
_VERSION = 2
"""1: shards had no checksums; it is still read."""


@dataclass(frozen=True)
class ShardEntry:
    """One shard of a manifest: file name relative to the manifest, samples, size in bytes, checksum with algorithm."""

    file: str
    samples: int
    bytes: int
    checksum: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What a directory of packed shards holds.

    Attributes:
        source: what was packed, as the user named it.
        kind: of source: text, arrays, table, images.
        options: all options of packing, defaults included.
        features: name -> {"dtype": ..., "shape": [...]} of one sample.
        sample_count: over all shards.
        shards: in order.
        details: what only one kind of source has: vocabulary size, class names, categories, dropped tokens.
    """

    source: str
    kind: str
    options: Mapping[str, Any]
    features: Mapping[str, Mapping[str, Any]]
    sample_count: int
    shards: tuple[ShardEntry, ...]
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Indented JSON, the same for equal manifests."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=2, ensure_ascii=False) + "\n"


def read_manifest(data_dir: Path) -> Manifest | None:
    """Reads `pack.json` of a directory of shards; None where there is none, as beside shards of other origin.

    Raises:
        DataError: the file is not a manifest, or of a newer version.
    """
    path = data_dir / MANIFEST_NAME
    try:
        values = json.loads(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{shown(path)!r} cannot be read: {error}. Pack the data again, or delete the file.") from error
    try:
        if values.pop("format") != _FORMAT:
            raise DataError(f"{shown(path)!r} is not onward's list of packed shards; move it elsewhere.")
        version = values.pop("version")
        if version not in (1, _VERSION):
            raise DataError(f"{shown(path)!r} has version {version}, this onward reads 1 to {_VERSION}: update onward.")
        shards = tuple(ShardEntry(**entry) for entry in values.pop("shards"))
        return Manifest(shards=shards, **values)
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{shown(path)!r} is damaged: {error!r}. Pack the data again, or delete the file.") from error
