"""Reads the file of an offline run of W&B: records in the log format of LevelDB, each a protocol buffer."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER, FILE_HEADER = 32768, 7, 7
COMPLETE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    run_id: str = ""
    exit_code: int | None = None
    points: set[tuple[str, int, float]] = field(default_factory=set)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


def records(content: bytes) -> Iterator[bytes]:
    """The records of a closed file; a record is one part, or several that end where a block ends."""
    assert content[:4] == b":W&B"
    place, parts, is_open = FILE_HEADER, b"", False
    while place < len(content):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        checksum, length, kind = struct.unpack("<IHB", content[place : place + HEADER])
        assert (kind in (FIRST, COMPLETE)) != is_open, f"part of kind {kind} at byte {place}"
        checked = content[place + HEADER - 1 : place + HEADER + length]
        assert len(checked) == 1 + length <= 1 + left - HEADER, f"the part at byte {place} is cut off"
        assert zlib.crc32(checked) == checksum, f"the part at byte {place} is damaged"
        parts += checked[1:]
        place += HEADER + length
        is_open = kind not in (LAST, COMPLETE)
        if not is_open:
            yield parts
            parts = b""
    assert not is_open, "the last record is cut off"


def read_run(path: Path) -> OfflineRun:
    """What a file holds that W&B's service has closed.

    The service keeps up to a block in memory, and closes a file some time after `finish()` has returned; the end of
    the service, as by `wandb.teardown()`, waits for it.
    """
    from wandb.proto import wandb_internal_pb2

    run = OfflineRun()
    for content in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run_id = record.run.run_id
            run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "config":
            run.config |= {item.key: json.loads(item.value_json) for item in record.config.update}
        elif kind == "summary":
            run.summary |= {item.key: json.loads(item.value_json) for item in record.summary.update}
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
        elif kind == "history":
            row = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            for name, value in row.items():
                if "/" in name:
                    run.points.add((name, int(row["update"]), float(value)))
    assert run.run_id, f"{path} holds no run: W&B's service has not closed it"
    return run
