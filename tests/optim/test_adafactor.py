"""Adafactor against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onward.optim.building import slots_by_name
from tests.optim.peers import assert_near, optimizer_of, train, train_peer, weights


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ({}, {}),
        (
            {"lambda": 0.1, "beta2_decay": -0.5, "clip_threshold": 2.0, "epsilon": 1e-5, "min_scale": 0.01},
            {"weight_decay": 0.1, "beta2_decay": -0.5, "d": 2.0, "eps": (1e-5, 0.01)},
        ),
    ],
)
def test_adafactor_equals_torch_s(rule: dict[str, Any], options: dict[str, Any]) -> None:
    """To 1e-6 of the largest element, its state included."""
    ours, theirs = weights(), weights()
    optimizer = train(optimizer_of("Adafactor", [rule]), ours, 0.01)
    peer: list[torch.optim.Optimizer] = []

    def make(given: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
        peer.append(torch.optim.Adafactor(given.values(), lr=0.01, foreach=False, **options))
        return peer

    train_peer(make, theirs)
    for name, weight in theirs.items():
        expected, found = peer[0].state[weight], slots_by_name(optimizer, ours)[name]
        assert expected.keys() == found.keys()
        for slot, tensor in expected.items():
            torch.testing.assert_close(found[slot], tensor, rtol=0, atol=1e-6 * float(tensor.max()))
    assert_near(ours, theirs, 1e-6)
