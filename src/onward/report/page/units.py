"""Names and numbers of a run as a report shows them: bytes, seconds and shares in the unit that their size asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onward.report.page.charts import Series

_TITLES = {
    "loss": "Loss",
    "gradient_norm": "Gradient norm",
    "learning_rate": "Learning rate",
    "samples_per_second": "Samples per second",
    "tokens_per_second": "Tokens per second",
    "loss_scale": "Loss scale",
    "skipped_updates": "Skipped updates",
    "mfu": "Model FLOPs utilization",
}
"""Of the numbers that have another title than their name with spaces."""

_UNITS = {
    "bytes": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes")),
    "seconds": ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds")),
    "mfu": ((0.01, "%"),),
}
"""Last part of a name -> units, the largest first, each with what it is of the unit that the file has."""


def in_units(name: str, series: Sequence[Series]) -> tuple[str, list[Series]]:
    """The title of a chart, and its series in the unit that the title names.

    Args:
        name: of a number in `metrics.jsonl`; its last part is its unit.
        series: as the file has them.
    """
    plain, _, unit = name.rpartition("_")
    units = {} if name.endswith("per_second") else _UNITS
    if unit not in units:
        return title_of(name), list(series)
    largest = max((abs(value) for one in series for _, value in one.points if value is not None), default=0.0)
    factor, words = next((one for one in units[unit] if largest >= one[0]), units[unit][-1])
    scaled = [
        replace(one, points=[(update, None if value is None else value / factor) for update, value in one.points])
        for one in series
    ]
    return f"{title_of(plain or name)} ({words})", scaled


def title_of(name: str) -> str:
    """`gradient_norm` as `Gradient norm`."""
    return _TITLES.get(name, name.replace("_", " ").capitalize())
