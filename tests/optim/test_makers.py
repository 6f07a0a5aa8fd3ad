"""Every optimizer of the registry is made with all its slots, and says what does not go together."""

from __future__ import annotations

import pytest
import torch

from onward.errors import ParametersError
from onward.optim.makers import MAKERS
from onward.optim.weight_shards import UNSHARDED
from onward.optimizers.registry import OPTIMIZERS

ATTRIBUTES = {
    "alpha": 0.9, "beta": 0.999, "lambda": 0.0, "epsilon": 1e-8, "momentum": 0.0, "nesterov": False,
    "do_bias_correction": True, "ratio_min": None, "ratio_max": 4.0, "use_muon": True, "beta2_decay": -0.8,
    "clip_threshold": 1.0, "min_scale": 1e-3, "options": {},
}  # fmt: skip


def made(name: str, **attributes: object) -> torch.optim.Optimizer:
    maker = MAKERS[name]
    group = maker.group({**ATTRIBUTES, **attributes})
    return maker.make([{"params": [torch.nn.Parameter(torch.ones(4, 4))], **group}], UNSHARDED)


def test_every_one_of_the_registry_has_a_row() -> None:
    assert set(MAKERS) == {kind.name for kind in OPTIMIZERS}


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "AdamW8bit" and not name.startswith("torch.")])
def test_slots_do_not_come_with_the_first_update(name: str) -> None:
    optimizer = made(name)
    (weight,) = optimizer.param_groups[0]["params"]
    before = set(optimizer.state[weight])
    optimizer.param_groups[0]["lr"] = 0.1
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert set(optimizer.state[weight]) == before
    assert not torch.equal(weight, torch.ones(4, 4))


def test_what_does_not_go_together() -> None:
    with pytest.raises(ParametersError, match="nesterov is true while momentum is 0; set a momentum"):
        made("SGDOptimizer", nesterov=True)
    with pytest.raises(ParametersError, match="alpha is 0, with which AdamWScheduleFree cannot average"):
        made("AdamWScheduleFree", alpha=0.0)


def test_bounds_that_are_absent_are_left_to_the_optimizer() -> None:
    group = MAKERS["Lamb"].group(ATTRIBUTES)
    assert "ratio_min" not in group
    assert group["ratio_max"] == 4.0
    assert type(made("Adam")) is torch.optim.Adam
    assert type(made("Adam", do_bias_correction=False)).__name__ == "AdamAsAsked"
