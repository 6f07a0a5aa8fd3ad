"""How many samples each replica of a run reads in an epoch, found without reading the samples themselves."""

from __future__ import annotations

from pathlib import Path

from onward.data.shard_files import find_shard_files
from onward.data.shard_format import index_shard
from onward.errors import DataError


def samples_of_replicas(data_dir: Path, replicas: int, skip_corrupt: bool = False) -> tuple[int, ...]:
    """Samples of an epoch of each replica: as `pack.json` lists them, else by the length fields of the files.

    Args:
        data_dir: directory of `.pb` shards.
        replicas: replica r reads the files i with i mod `replicas` == r.
        skip_corrupt: files that cannot be read count nothing, as training leaves them out.

    Raises:
        DataError: the directory is missing or holds fewer shards than there are replicas, or a shard is broken.
    """
    counts = []
    for replica in range(replicas):
        files = find_shard_files(data_dir, replica, replicas)
        paths = [path for path in files.paths if not (skip_corrupt and path in files.damaged)]
        counts.append(sum(_count(path, files.sample_counts.get(path.name), skip_corrupt) for path in paths))
    if not min(counts):
        raise DataError(f"no shard of replica {counts.index(0)} in {str(data_dir)!r} can be read; pack the data again.")
    return tuple(counts)


def _count(path: Path, listed: int | None, skip_corrupt: bool) -> int:
    if listed is not None:
        return listed
    try:
        return index_shard(path).sample_count
    except DataError:
        if skip_corrupt:
            return 0
        raise
