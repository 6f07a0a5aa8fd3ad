"""What a calibration measures and prints, with measurements made up."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onward.commands import calibration
from onward.errors import OnwardError
from onward.parallel.communication_trial import CommunicationSpeed
from onward.plan.search.hardware import Link

PHASES: Any = SimpleNamespace(begin=lambda name: None)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(calibration.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(calibration, "usable_cores", lambda: 2)
    return monkeypatch


def rates(kind: str, seconds: float, link: Link | None = None, crowded: Link | None = None) -> dict[str, Any]:
    one = link or Link(1e9, 1e-5)
    device = {
        "name": "a processor", "operations_per_second": {"float32": 2e12}, "bytes_per_second": 3e10,
        "operator_seconds": 4e-6,
    }  # fmt: skip
    more = {} if crowded is None else {"crowded": dataclasses.asdict(crowded)}
    return {"device": device, "inside": dataclasses.asdict(one), **more}


@pytest.mark.parametrize("cores", [1, 2])
def test_rates_are_kept_and_said(cores: int, two_cores: pytest.MonkeyPatch) -> None:
    def measured(count: int, kind: str, seconds: float) -> CommunicationSpeed:
        return CommunicationSpeed(
            processes=count,
            backend="gloo",
            bytes_per_second=5e9 * 2 / count,
            latency_seconds=2e-5,
            gathered_bytes_per_second=4e9,
            scattered_bytes_per_second=2e9,
        )

    two_cores.setattr(calibration, "usable_cores", lambda: cores)
    two_cores.setattr(calibration, "measure_communication", measured)
    two_cores.setattr(calibration, "rates_of", rates)
    two_cores.setattr(calibration, "keep_rates", lambda kind, found: Path(f"{kind}.json"))
    text = calibration.calibrate(PHASES)
    assert text.startswith("a processor, one core\n")
    assert "2,000 GFLOP/s" in text
    ring = "5 GB/s, 10 us, all-gathers 2 GB/s, reduce-scatters 1 GB/s"
    crowded = "3.75 GB/s, 5 us, all-gathers 3 GB/s, reduce-scatters 1.5 GB/s"
    words = " ".join(text.split())
    assert (f"communication {ring}" in words) == (f"between 4 processes {crowded}" in words) == (cores == 2)
    assert (f"between 2 processes {ring}" in words) == (cores == 1)
    assert ("1 GB/s, 10 us (assumed: there is one device)" in text) == (cores == 1)
    assert text.endswith("wrote cpu.json\n")


def test_processes_that_cannot_communicate(two_cores: pytest.MonkeyPatch) -> None:
    two_cores.setattr(calibration, "measure_communication", lambda count, kind, seconds: 7)
    with pytest.raises(OnwardError, match=r"2 processes on this machine's cpu cannot communicate \(exit code 7\)"):
        calibration.calibrate(PHASES)
