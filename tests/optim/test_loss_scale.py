"""The loss scale follows the constants of ONNX Runtime's LossScaler, and survives JSON to the last bit."""

from __future__ import annotations

import json

import pytest

from onward.optim.loss_scale import LossScale


def test_the_dynamic_scale_doubles_after_2000_finite_updates_in_a_row() -> None:
    scale = LossScale.of_parameter(0.0)
    assert (scale.scale, scale.dynamic) == (65536.0, True)
    for _ in range(1999):
        scale = scale.after(True)
    assert scale.scale == 65536.0
    scale = scale.after(True)
    assert (scale.scale, scale.finite_updates) == (131072.0, 0)


def test_an_update_that_is_not_finite_halves_it_and_starts_the_count_again() -> None:
    scale = LossScale()
    for _ in range(1999):
        scale = scale.after(True)
    scale = scale.after(False)
    assert (scale.scale, scale.finite_updates) == (32768.0, 0)
    for _ in range(1999):
        scale = scale.after(True)
    assert scale.scale == 32768.0
    assert scale.after(True).scale == 65536.0


def test_it_stays_within_1_and_2_to_the_24th() -> None:
    scale = LossScale()
    for _ in range(100):
        scale = scale.after(False)
    assert scale.scale == 1.0
    scale = LossScale(window_updates=1)
    for _ in range(100):
        scale = scale.after(True)
    assert scale.scale == 16777216.0


def test_a_static_scale_never_changes() -> None:
    scale = LossScale.of_parameter(128.0)
    assert (scale.scale, scale.dynamic) == (128.0, False)
    assert scale.after(False) == scale.after(True) == scale.reset() == scale


def test_torch_s_gradient_scaler_goes_the_same_way() -> None:
    """500 updates, two of 23 overflowing, against torch.amp.GradScaler, which has no bounds, inside our bounds."""
    torch = pytest.importorskip("torch")
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=7)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    ours = LossScale(window_updates=7)
    for update in range(500):
        finite = update % 23 not in (5, 19)
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.ones(1) if finite else torch.full((1,), float("inf"))
        scaler.step(optimizer)
        scaler.update()
        ours = ours.after(finite)
        assert ours.scale == scaler.get_scale()


def test_reset_goes_back_to_the_initial_scale() -> None:
    assert LossScale().after(False).after(True).reset() == LossScale()


def test_json_gives_back_an_equal_value() -> None:
    scale = LossScale(scale=2.0**21 + 0.1, finite_updates=17)
    assert LossScale.from_json(json.loads(json.dumps(scale.to_json()))) == scale


def test_json_of_another_shape_and_a_senseless_scale_are_refused() -> None:
    with pytest.raises(TypeError, match=r"a loss scale has the fields .*'finite_updates'.*, found \['scale'\]"):
        LossScale.from_json({"scale": 1.0})
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="expected a positive, finite number"):
            LossScale(scale=value)
