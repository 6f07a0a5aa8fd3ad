"""Units of charts: the one that the largest value asks for."""

from __future__ import annotations

import pytest

from onward.report.page.charts import (
    Series,
)
from onward.report.page.units import in_units


@pytest.mark.parametrize(
    ("name", "values", "title", "shown"),
    [
        ("peak_memory_bytes", [3 * 2**29, 2**31], "Peak memory (GiB)", [1.5, 2.0]),
        ("peak_memory_bytes", [2**29, 2**30 - 1024], "Peak memory (MiB)", [512.0, 1023.9990234375]),
        ("data_wait_seconds", [0.0, 0.004], "Data wait (milliseconds)", [0.0, 4.0]),
        ("data_wait_seconds", [0.0, 5.0], "Data wait (seconds)", [0.0, 5.0]),
        ("data_wait_seconds", [0.0, 0.0], "Data wait (microseconds)", [0.0, 0.0]),
        ("samples_per_second", [1e6, 2e6], "Samples per second", [1e6, 2e6]),
        ("mfu", [0.1, 0.43], "Model FLOPs utilization (%)", [10.0, 43.0]),
        ("gradient_norm", [1.0, None], "Gradient norm", [1.0, None]),
    ],
)
def test_units(name: str, values: list[float | None], title: str, shown: list[float | None]) -> None:
    found, (series,) = in_units(name, [Series("", list(enumerate(values)))])
    assert found == title
    assert [value for _, value in series.points] == [None if one is None else pytest.approx(one) for one in shown]
