"""Reads the file of an offline run of W&B: records in the log format of LevelDB, each a protocol buffer."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER, FILE_HEADER = 32768, 7, 7


@dataclass
class OfflineRun:
    run_id: str = ""
    exit_code: int | None = None
    points: set[tuple[str, int, float]] = field(default_factory=set)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


def records(path: Path) -> Iterator[bytes]:
    content, place, parts = path.read_bytes(), FILE_HEADER, b""
    assert content[:4] == b":W&B"
    while place + HEADER <= len(content):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + HEADER])
        parts += content[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # complete, or the last part
            yield parts
            parts = b""


def read_run(path: Path) -> OfflineRun:
    from wandb.proto import wandb_internal_pb2

    run = OfflineRun()
    for content in records(path):
        record = wandb_internal_pb2.Record()
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
    return run
