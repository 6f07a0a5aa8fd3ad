"""Which shard files a data directory holds, which of them a rank reads, and whether all of them are there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onward.data.manifest import MANIFEST_NAME, Manifest, read_manifest
from onward.errors import DataError, ParametersError
from onward.remote.files import Entry, list_folder, shown


@dataclass(frozen=True, kw_only=True)
class ShardFiles:
    """The shards of one rank.

    Attributes:
        data_dir: the directory.
        paths: this rank's files, in order of name.
        numbers: of each of them, its number among the files of all ranks.
        total: files of all ranks.
        sample_counts: file name -> samples, for files that `pack.json` lists.
        checksums: file name -> checksum of its bytes; all files that `pack.json` lists, or none.
        damaged: paths of this rank whose size or presence contradicts `pack.json` -> what is wrong.
        fingerprint: of names, sizes and partition.
        manifest: `pack.json`; None: there is none.
    """

    data_dir: Path
    paths: tuple[Path, ...]
    numbers: tuple[int, ...]
    total: int
    sample_counts: Mapping[str, int]
    checksums: Mapping[str, str] = field(default_factory=dict)
    damaged: Mapping[Path, str] = field(default_factory=dict)
    fingerprint: str = ""
    manifest: Manifest | None = None


def list_shards(data_dir: Path) -> dict[Path, int]:
    """The `.pb` files of a directory, sorted by name, without hidden ones and without its folders', and their bytes.

    Raises:
        DataError: the directory is missing, is none, or cannot be listed.
    """
    try:
        return {data_dir / entry.name: entry.size_bytes for entry in list_folder(data_dir) if _is_shard(entry)}
    except FileNotFoundError:
        raise DataError(
            f"data directory {shown(data_dir)!r} does not exist; give a directory with .pb shards."
        ) from None
    except NotADirectoryError:
        raise DataError(f"data directory {shown(data_dir)!r} is a file; give the directory that holds it.") from None
    except OSError as error:
        raise DataError(f"data directory {shown(data_dir)!r} cannot be listed: {error.strerror or error}.") from error


def _is_shard(entry: Entry) -> bool:
    return entry.name.endswith(".pb") and not entry.name.startswith(".") and entry.is_file


def find_shard_files(data_dir: Path, rank: int, size: int) -> ShardFiles:
    """Lists a directory and takes the files i with i mod `size` == `rank`.

    Raises:
        ParametersError: rank or size make no sense.
        DataError: the directory is missing, holds no shards, or fewer than there are ranks.
    """
    if not (type(rank) is int and type(size) is int and 0 <= rank < size):
        raise ParametersError(f"rank {rank!r} of {size!r}: expected integers with 0 <= rank < size.")
    sizes = list_shards(data_dir)
    paths = list(sizes)
    manifest = read_manifest(data_dir)
    if not paths:
        raise DataError(f"data directory {shown(data_dir)!r} holds no .pb files{_where_else(data_dir)}")
    if len(paths) < size:
        few = f" {manifest.sample_count // size}" if manifest and manifest.sample_count >= size else ""
        raise DataError(
            f"data directory {shown(data_dir)!r} holds {len(paths)} .pb files for {size} data-parallel ranks; every "
            f"rank reads its own files. Pack the data again with onward pack --samples-per-file{few} --overwrite, set "
            "distributed.data_parallel_size to at most the number of files, or, for test data, set data.test_data to "
            "replicated."
        )
    listed = {entry.file: entry for entry in manifest.shards} if manifest else {}
    numbers = tuple(range(rank, len(paths), size))
    mine = tuple(paths[number] for number in numbers)
    description = repr(([(path.name, sizes[path]) for path in paths], rank, size))
    return ShardFiles(
        data_dir=data_dir,
        paths=mine,
        numbers=numbers,
        total=len(paths),
        sample_counts={name: entry.samples for name, entry in listed.items()},
        checksums={name: entry.checksum for name, entry in listed.items() if entry.checksum},
        damaged=_find_damage(data_dir, manifest, sizes, mine),
        fingerprint=hashlib.sha256(description.encode()).hexdigest()[:16],
        manifest=manifest,
    )


def _where_else(data_dir: Path) -> str:
    folders = [one.name for one in list_folder(data_dir) if not one.is_file and not one.name.startswith(".")]
    inside = [name for name in folders if any(map(_is_shard, list_folder(data_dir / name)))]
    if inside:
        return f", but its folders {', '.join(map(repr, inside))} do: give one of those."
    return "; write shards there with onward pack, or give another directory."


def _find_damage(
    data_dir: Path, manifest: Manifest | None, sizes: Mapping[Path, int], mine: tuple[Path, ...]
) -> dict[Path, str]:
    if manifest is None:
        return {}
    damage = {}
    for entry in manifest.shards:
        path = data_dir / entry.file
        if path not in sizes:
            damage[path] = (
                f"shard {str(path)!r} is missing; {MANIFEST_NAME} lists it with {entry.samples} samples. Copy it here "
                f"or pack again; to go on without it, set skip_corrupt or delete {MANIFEST_NAME}."
            )
        elif path in mine and sizes[path] != entry.bytes:
            damage[path] = (
                f"shard {str(path)!r} has {sizes[path]} bytes, but {MANIFEST_NAME} says {entry.bytes} ({entry.samples} "
                "samples): it was cut off or replaced. Copy it again or pack again; to go on without it, set "
                f"skip_corrupt; if it was replaced on purpose, delete {MANIFEST_NAME}."
            )
    return damage
