"""Which checkpoint in the memory of the hosts a run resumes from: the newest of which every file is on some node."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from onward.checkpoint.agreement import decide_together, do_together
from onward.checkpoint.disk import discard
from onward.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, read_manifest
from onward.checkpoint.memory.nodes import Nodes
from onward.checkpoint.reading import checkpoint_name, checkpoint_number, list_checkpoints, verify_files
from onward.errors import CheckpointError
from onward.parallel.messages import Json, broadcast_json
from onward.untrusted_files import read_text


@dataclass(frozen=True)
class OnDisk:
    """What a checkpoint in memory must be newer than.

    Attributes:
        update: of the newest checkpoint on disk; -1: there is none.
        sequence: of that save among all of its folder; 0: there is none.
    """

    update: int = -1
    sequence: int = 0


@dataclass(frozen=True)
class Chosen:
    """A checkpoint in memory.

    Attributes:
        path: on this rank's node, where its manifest is.
        files: of its data files, those that this rank has verified; each file of a node is verified by one rank.
    """

    path: Path
    files: tuple[str, ...]


def choose_in_memory(
    root: Path, nodes: Nodes, group: dist.ProcessGroup | None, on_disk: OnDisk
) -> tuple[Chosen | None, list[str]]:
    """The checkpoint to resume from, with its manifest on every node, and what to report; None: there is none that is
    complete and newer than the one on disk. All others are removed.

    Args:
        root: the run's folder in the memory of this node.
        nodes: who shares it.
        group: the ranks that choose together; None: this process alone.
        on_disk: what it must be newer than; rank 0's counts.

    Raises:
        StorageError, OnwardError: a folder cannot be written to; on every rank.
    """
    held: dict[str, Chosen] = {}

    def propose() -> Json:
        proposed = []
        for path in list_checkpoints(root):
            try:
                digest, manifest = _digest(path), read_manifest(path)
            except (CheckpointError, OSError, UnicodeDecodeError):
                continue  # as good as absent
            files = [manifest.files[index] for index in nodes.share(len(manifest.files))]
            found, damaged = [], 0
            for entry in files:
                if (path / entry.name).exists():
                    try:
                        verify_files(path, [entry])
                        found.append(entry.name)
                    except CheckpointError:
                        damaged += 1
            held[digest] = Chosen(path, tuple(found))
            proposed.append(_proposal(path, digest, manifest, found, damaged))
        return proposed

    def decide(proposals: list[Any]) -> Sequence[Json]:
        return [_decide(proposals, on_disk)] * len(proposals)

    answer = decide_together(group, propose, decide)
    digest, chosen, text = answer["digest"], None, ""
    if digest is not None:
        own = root / checkpoint_name(answer["update"])
        has_manifest = digest in held
        text = read_text(held[digest].path / MANIFEST_NAME) if has_manifest else ""
        text = text if group is None else broadcast_json(group, text, answer["holder"])
        chosen = held.get(digest, Chosen(own, ()))

    def settle() -> None:
        if not nodes.is_first:
            return
        for path in root.iterdir():
            if chosen is None or path != chosen.path:
                discard(path)
        if chosen is not None and digest not in held:
            chosen.path.mkdir()
            (chosen.path / MANIFEST_NAME).write_text(text, encoding="utf-8")

    do_together(group, settle)
    return chosen, list(answer["notes"])


def _digest(path: Path) -> str:
    return hashlib.sha256(read_text(path / MANIFEST_NAME).encode()).hexdigest()


def _proposal(path: Path, digest: str, manifest: CheckpointManifest, files: list[str], damaged: int) -> Json:
    marker = manifest.record.get("memory")
    sequence = marker.get("disk_sequence") if isinstance(marker, Mapping) else None
    return {
        "digest": digest,
        "update": checkpoint_number(path),
        "disk_sequence": sequence if isinstance(sequence, int) else 0,
        "files": files,
        "damaged": damaged,
        "total": len(manifest.files),
    }


def _decide(proposals: Sequence[Sequence[Mapping[str, Any]]], on_disk: OnDisk) -> Mapping[str, Json]:
    """Rank 0's answer to all proposals."""
    found: dict[str, dict[str, Any]] = {}
    for rank, proposed in enumerate(proposals):
        for one in proposed:
            entry = found.setdefault(one["digest"], {**one, "files": set(), "damaged": 0, "holder": rank})
            entry["files"] |= set(one["files"])
            entry["damaged"] += one["damaged"]
    notes = []
    for digest, one in sorted(found.items(), key=lambda item: -item[1]["update"]):
        name = f"{checkpoint_name(one['update'])} in memory"
        if one["update"] <= on_disk.update:
            break
        if one["disk_sequence"] > on_disk.sequence:
            notes.append(
                f"{name} is not used: a checkpoint that was on disk when it was taken has been removed since, so that "
                "the run goes back to an earlier one."
            )
        elif len(one["files"]) < one["total"]:
            damaged = f", {one['damaged']} of them damaged" if one["damaged"] else ""
            notes.append(
                f"{name} is not used: of its {one['total']} files, {one['total'] - len(one['files'])} are on no "
                f"node{damaged}."
            )
        else:
            return {"digest": digest, "update": one["update"], "holder": one["holder"], "notes": notes}
    return {"digest": None, "notes": notes}
