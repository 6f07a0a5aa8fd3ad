"""A handful of architectures trained on a device and in torch; `python -m benchmarks.coverage --steps` has all."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.device.architecture_steps import RELATIVE, compare_steps
from tests.device.rounding import DRAWS, Batches, compare_rounding
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
    assert difference.tensors >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet_v2", "mobilevit"])
def test_rounding_that_a_network_magnifies_is_torchs_too(name: str, tmp_path: Path) -> None:
    """Normalized over two images down to planes of one pixel: one rounding of the input moves a step by 1e-3."""
    difference = compare_steps(BY_NAME[name], tmp_path)
    assert difference.is_equal
    assert difference.beyond is None or difference.beyond.torch > RELATIVE / 2


@pytest.mark.parametrize(("error", "is_alike"), [(0.0, True), (1e-6, False)])
def test_a_device_is_compared_with_the_rounding_of_torch(error: float, is_alike: bool) -> None:
    drawn = list[Tensor]()

    def step(batches: Batches, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
        ((x,),) = batches
        drawn.append(x)
        return [1.0], {"total": x.to(dtype).cumsum(0)[-1]}

    def on_device(batches: Batches) -> tuple[list[float], dict[str, Tensor]]:
        losses, found = step(batches, torch.float32)
        return losses, {"total": found["total"] * (1 + error)}

    ones = [(torch.ones(10_000),)]
    found = compare_rounding(on_device, step, lambda a, b: abs(float(a["total"]) - b["total"].item()) / 1e4, ones)
    assert found.is_alike is is_alike
    values = torch.stack(drawn[::3]).unique().tolist()
    assert len(drawn) == 3 * DRAWS
    assert values == [1 - 2**-24, 1.0]  # and no neighbor above, which is twice as far
