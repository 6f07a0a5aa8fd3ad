"""How a feature becomes an input: as it is, reshaped, as an image in another order, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from onward.proposal.fitting import channels_last, fit, fits, image_size
from tests.proposal.facts import feature, port, words


@pytest.mark.parametrize(
    ("found", "wanted", "operations"),
    [
        ((3,), (3,), ()),
        ((3,), ("n",), ()),
        ((), (1,), ("reshape:1",)),
        ((1, 28, 28), (28, 28), ("reshape:28x28",)),
        ((28, 28), (1, 28, 28), ("reshape:1x28x28",)),
        ((784,), (1, 28, 28), ("reshape:1x28x28",)),
        ((32, 32, 3), (3, 32, 32), ("transpose:2,0,1",)),
        ((3, 32, 32), (32, 32, 3), ("transpose:1,2,0",)),
        ((20, 20, 3), (32, 32, 3), ("transpose:2,0,1", "resize:32x32", "transpose:1,2,0")),
        ((28, 28), (3, 32, 32), ("reshape:1x28x28", "repeat:3", "resize:32x32")),
        ((1, 28, 28), (3, "h", "w"), ("repeat:3",)),
    ],
)
def test_shapes(found: tuple[int, ...], wanted: tuple[int | str, ...], operations: tuple[str, ...]) -> None:
    got = fit(feature("f", np.zeros((2, *found), np.float32)), port("x", *wanted))
    assert got is not None
    assert got.operations == operations
    assert len(got.reasons) >= bool(operations)
    assert bool(got.operations or got.cast) is bool(operations)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [((4,), (3,)), ((3, 3), (2,)), ((3, 32, 32), (1, 32, 32)), ((), ("a", "b"))],
)
def test_shapes_that_do_not_fit(found: tuple[int, ...], wanted: tuple[int | str, ...]) -> None:
    assert fit(feature("f", np.zeros((2, *found), np.float32)), port("x", *wanted)) is None


def test_types() -> None:
    bytes_ = feature("f", np.zeros((2, 3), np.uint8))
    assert fit(bytes_, port("x", 3)).operations == ("scale:0.00392156863",)  # type: ignore[union-attr]
    assert fit(bytes_, port("x", 3), is_scaled_inside=True).operations == ()  # type: ignore[union-attr]
    whole, broken = (feature("f", np.array([[number]], np.float32)) for number in (2.0, 2.5))
    assert fit(whole, port("x", 1, dtype="int64")).cast == "int64"  # type: ignore[union-attr]
    assert fit(broken, port("x", 1, dtype="int64")) is None
    assert fit(whole, port("x", 1, dtype="bool")) is None
    assert fit(feature("f", [[1]]), port("x", 1, dtype="bool")).cast == "bool"  # type: ignore[union-attr]
    assert fit(words("f", "a"), port("x", 1)) is None
    assert fit(bytes_, port("x", 3, dtype="string")) is None


def test_shapes_that_match() -> None:
    assert fits((1, 2), ("n", 2))
    assert not fits((1, 2), ("n",))
    assert fits((), ())


@pytest.mark.parametrize(
    ("shape", "last"),
    [((3, 8, 8), False), ((8, 8, 3), True), ((3, 8, 3), False), ((8, 8, 8), None), ((3, 8), None), (("c", 8, 3), True)],
)
def test_where_channels_are(shape: tuple[int | str, ...], last: bool | None) -> None:
    assert channels_last(shape) is last


def test_open_sizes_come_from_the_data_within_bounds() -> None:
    assert image_size((3, "h", "w"), (500, 100)) == (224, 96)
    assert image_size((3, "h", 64), (10, 100)) == (32, 64)
    assert image_size(("h", "w", 3), (64, 100)) == (64, 96)
