"""The record of a run in a checkpoint: every field of its type, and replicas that make sense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onward.checkpoint.manifest import CheckpointManifest, write_manifest
from onward.checkpoint.run_record import read_run_record
from onward.errors import CheckpointError

CURSOR = {"epoch": 0, "sample": 3, "file": None, "file_sample": 0, "fingerprint": "a"}


def record() -> dict[str, Any]:
    return {"counters": {"step": 1, "update": 1}, "cursor": dict(CURSOR), "loss_scale": None}


def read(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    write_manifest(folder, CheckpointManifest(sequence=1, files=(), tensors={}, record=found, written_by={}))
    return read_run_record(folder)


def test_records_of_one_process_and_of_several(tmp_path: Path) -> None:
    assert read(record(), tmp_path) == record()
    several = {**record(), "ranks": {"0": {"data": 1, "cursor": CURSOR}, "1": {"data": 0, "cursor": CURSOR}}}
    assert read(several, tmp_path) == several


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no cursor": (lambda r: r.pop("cursor"), "it has neither cursor nor ranks."),
    "replicas": (lambda r: r.update(ranks={"0": {"data": 1, "cursor": CURSOR}}), "its ranks are of the replicas [1]"),
    "negative": (lambda r: r["counters"].update(step=-1), "counters"),
    "unknown counter": (lambda r: r["counters"].update(stepp=1), "stepp"),
    "a flag": (lambda r: r["counters"].update(step=True), "counters"),
    "rate": (lambda r: r.update(learning_rate={"scale": float("nan")}), "learning_rate"),
    "loss scale": (lambda r: r.update(loss_scale={"scale": 0.0}), "loss_scale"),
    "batch sizes": (lambda r: r.update(batch_sizes={"0": [1]}), "batch_sizes"),
    "callbacks": (lambda r: r.update(callbacks={"a": 3}), "callbacks"),
    "cursor": (lambda r: r["cursor"].update(epoch="0"), "cursor"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_refused(change: str, tmp_path: Path) -> None:
    found, (spoil, words) = record(), CHANGES[change]
    spoil(found)
    with pytest.raises(CheckpointError, match="holds no record of a run: ") as caught:
        read(found, tmp_path)
    assert words in str(caught.value)
    assert str(caught.value).endswith("Name another checkpoint.")
