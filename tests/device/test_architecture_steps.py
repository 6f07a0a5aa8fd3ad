"""A handful of architectures trained on a device and in torch; `python -m benchmarks.coverage --steps` has all."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.device.architecture_steps import RELATIVE, compare_steps
from tests.lowering.architectures import ARCHITECTURES

pytest.importorskip("transformers")
BY_NAME = {one.name: one for one in ARCHITECTURES}
SLOW = ("pyramid", "residual", "bidirectional_gru", "experts")


@pytest.mark.parametrize(
    "name",
    ["spatial_transformer", "lstm", "spectral_mixing", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def test_steps_are_those_of_torch(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    difference = compare_steps(BY_NAME[name], tmp_path)
    assert difference.largest <= RELATIVE
    assert difference.is_equal
    assert difference.tensors > 3
