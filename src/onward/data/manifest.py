"""`pack.json`, the list of contents next to packed shards, by which a loader notices that samples were lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from onward.errors import DataError
from onward.remote.files import read_text, shown, url_of
from onward.untrusted_files import RefusedFile, first_problem, parse_json, path_inside, validated

MANIFEST_NAME = "pack.json"
_FORMAT = "onward-pack"
_VERSION = 2
"""1: shards had no checksums; it is still read."""

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


@dataclass(frozen=True)
class ShardEntry:
    """One shard of a manifest: file name relative to the manifest, samples, size in bytes, checksum with algorithm."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    file: str
    samples: Count
    bytes: Count
    checksum: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a directory of packed shards holds.

    Attributes:
        source: what was packed, as the user named it.
        kind: of source: text, arrays, table, images, audio.
        options: all options of packing, defaults included.
        features: name -> {"dtype": ..., "shape": [...]} of one sample.
        sample_count: over all shards.
        shards: in order.
        details: what only one kind of source has: vocabulary size, class names, categories, dropped tokens.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    source: str
    kind: str
    options: Mapping[str, Any]
    features: Mapping[str, Mapping[str, Any]]
    sample_count: Count
    shards: tuple[ShardEntry, ...]
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Indented JSON, the same for equal manifests."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=2, ensure_ascii=False) + "\n"


def read_manifest(data_dir: Path) -> Manifest | None:
    """Reads `pack.json` of a directory of shards; None where there is none, as next to shards of other origin.

    Raises:
        DataError: the file is not a manifest, or of a newer version.
    """
    path = data_dir / MANIFEST_NAME
    try:
        values = parse_json(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{shown(path)!r} cannot be read: {error}. Pack the data again, or delete the file.") from error
    try:
        if not isinstance(values, dict) or "format" not in values:
            raise DataError(f"{shown(path)!r} is damaged: it names no format. Pack the data again, or delete the file.")
        if values.pop("format") != _FORMAT:
            raise DataError(f"{shown(path)!r} is not onward's list of packed shards; move it elsewhere.")
        version = values.pop("version", None)
        if version not in (1, _VERSION):
            raise DataError(
                f"{shown(path)!r} has version {version!r}, this onward reads 1 to {_VERSION}: update onward."
            )
        manifest = validated(Manifest, values)
        for shard in manifest.shards:
            if url_of(data_dir) is None:
                path_inside(data_dir, shard.file)
        return manifest
    except ValidationError as error:
        raise DataError(
            f"{shown(path)!r} is damaged: {first_problem(error)} Pack the data again, or delete the file."
        ) from error
    except RefusedFile as error:
        raise DataError(f"{shown(path)!r}: {error} Pack the data again, or delete the file.") from error
