"""What the manifest of a run's checkpoint says in addition to its tensors, checked field by field before a run uses
it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

import pydantic
from typing_extensions import TypedDict

from onward.checkpoint.manifest import MANIFEST_NAME, Size
from onward.checkpoint.reading import read_record
from onward.errors import CheckpointError
from onward.untrusted_files import first_problem, validated

_Number = Annotated[float, pydantic.Field(strict=True, allow_inf_nan=False)]
_Positive = Annotated[float, pydantic.Field(strict=True, allow_inf_nan=False, gt=0)]
_Flag = Annotated[bool, pydantic.Field(strict=True)]


class _Counters(TypedDict, total=False):
    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")  # type: ignore[misc]
    step: Size
    round: Size
    update: Size
    skipped_updates: Size
    samples: Size
    ended_early_of: Size


class _Cursor(TypedDict):
    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")  # type: ignore[misc]
    epoch: Size
    sample: Size
    file: Size | None
    file_sample: Size
    fingerprint: str


_Place = Annotated[list[Size], pydantic.Field(min_length=2, max_length=2)]


class _Rank(TypedDict):
    data: Size
    cursor: _Cursor
    left_out: NotRequired[list[Annotated[list[_Place], pydantic.Field(min_length=2, max_length=2)]]]


class _Course(TypedDict, total=False):
    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")  # type: ignore[misc]
    losses: list[Annotated[float, pydantic.Field(strict=True)]]
    log_norms: list[Annotated[float, pydantic.Field(strict=True)]]
    rollbacks: Size
    first_loss: _Number | None


class _LossScale(TypedDict):
    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")  # type: ignore[misc]
    scale: _Positive
    dynamic: _Flag
    finite_updates: Size
    initial_scale: _Positive
    window_updates: Size
    minimum: _Positive
    maximum: _Positive


class _Rate(TypedDict, total=False):
    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")  # type: ignore[misc]
    scale: _Number
    fixed: _Number | None


class _Memory(TypedDict):
    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")  # type: ignore[misc]
    layout: str
    disk_sequence: Size


class _Record(TypedDict):
    counters: _Counters
    cursor: NotRequired[_Cursor]
    ranks: NotRequired[dict[str, _Rank]]
    loss_scale: _LossScale | None
    learning_rate: NotRequired[_Rate]
    course: NotRequired[_Course]
    parameters: NotRequired[dict[str, Any]]
    batch_sizes: NotRequired[dict[str, Annotated[list[Size], pydantic.Field(min_length=2, max_length=2)]]]
    callbacks: NotRequired[dict[str, dict[str, Any]]]
    base_checksum: NotRequired[str]
    memory: NotRequired[_Memory]


def read_run_record(path: Path) -> dict[str, Any]:
    """The record of the checkpoint at `path`, every field of it that a run uses of its type.

    Raises:
        CheckpointError: the manifest is missing or damaged, or the record is not one of a run.
    """
    record = read_record(path)
    try:
        validated(_Record, record)
        _check_replicas(record)
    except pydantic.ValidationError as error:
        raise CheckpointError(
            f"{path / MANIFEST_NAME} holds no record of a run: {first_problem(error)} Name another checkpoint."
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{path / MANIFEST_NAME} holds no record of a run: {error} Name another checkpoint."
        ) from error
    return record


def _check_replicas(record: Mapping[str, Any]) -> None:
    replicas = {rank["data"] for rank in record.get("ranks", {}).values()}
    if not replicas and "cursor" not in record:
        raise ValueError("it has neither cursor nor ranks.")
    if replicas != set(range(len(replicas))):
        raise ValueError(f"its ranks are of the replicas {sorted(replicas)[:8]}; expected 0, 1 and so on.")
