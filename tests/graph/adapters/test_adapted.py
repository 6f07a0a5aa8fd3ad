"""An adapted weight: names and shapes of its adapter, as PEFT has them."""

from __future__ import annotations

from typing import Any

import pytest

from onward.graph.adapters.adapted import AdaptedWeight
from onward.graph.adapters.uses import Reading


def adapted(shape: tuple[int, ...], **given: Any) -> AdaptedWeight:
    fields = {"rank": 2, "scale": 1.0, "reading": Reading.RIGHT, "outputs_first": True, "has_magnitude": False}
    return AdaptedWeight(weight="w", shape=shape, **{**fields, **given})


@pytest.mark.parametrize(
    ("weight", "shapes", "axes"),
    [
        (adapted((5, 7)), [(2, 7), (5, 2)], [0, 1]),
        (adapted((5, 7), outputs_first=False), [(2, 5), (7, 2)], [0, 1]),
        (adapted((3, 5, 7)), [(3, 2, 7), (3, 5, 2)], [1, 2]),
        (adapted((5, 7, 3, 3), reading=Reading.CONVOLUTION), [(2, 7, 3, 3), (5, 2, 1, 1)], [0, 1]),
        (adapted((5, 7, 3), reading=Reading.CONVOLUTION), [(2, 7, 3), (5, 2, 1)], [0, 1]),
    ],
)
def test_shapes(weight: AdaptedWeight, shapes: list[tuple[int, ...]], axes: list[int]) -> None:
    assert weight.shapes == dict(zip(("w.lora_A", "w.lora_B"), shapes, strict=True))
    assert weight.rank_axes == dict(zip(("w.lora_A", "w.lora_B"), axes, strict=True))
    for name, axis in weight.rank_axes.items():
        assert weight.shapes[name][axis] == weight.rank


def test_a_magnitude_is_of_each_output() -> None:
    stacked = adapted((3, 5, 7), has_magnitude=True)
    assert stacked.names == ("w.lora_A", "w.lora_B", "w.lora_magnitude")
    assert stacked.shapes["w.lora_magnitude"] == (3, 5)
    kernel = adapted((5, 7, 3, 3), reading=Reading.CONVOLUTION, has_magnitude=True)
    assert kernel.matrix == (5, 63)
    assert kernel.shapes["w.lora_magnitude"] == (5,)
