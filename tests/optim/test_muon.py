"""Muon against torch's, and AdamW's for the weights that are no matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onward.errors import ParametersError
from onward.optim.building import make_optimizer, slots_by_name
from onward.optim.muon import orthogonalized
from tests.optim.peers import assert_near, optimizer_of, train, train_peer, weights


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torch_s_and_adamw_for_the_rest(nesterov: bool) -> None:
    """Matrices in every bit (of torch's rounding of the learning rate, 1e-7), vectors to 1e-6."""
    matrices = ("h.0.weight", "a[0]/w")
    rule = {"lambda": 0.1, "epsilon": 1e-6, "alpha": 0.8, "beta": 0.95, "momentum": 0.9, "nesterov": nesterov}
    settings = optimizer_of("Muon", [rule, {"weights": matrices, "use_muon": True}])
    ours, theirs = weights(), weights()
    optimizer = train(settings, ours, 0.01)

    def make(given: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
        options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
        hidden = [given[name] for name in matrices]
        rest = [weight for name, weight in given.items() if name not in matrices]
        return [
            torch.optim.Muon(hidden, momentum=0.9, nesterov=nesterov, adjust_lr_fn="match_rms_adamw", **options),
            torch.optim.AdamW(rest, betas=(0.8, 0.95), eps=1e-6, **options),
        ]

    train_peer(make, theirs)
    assert_near({name: ours[name] for name in matrices}, {name: theirs[name] for name in matrices}, 1e-7)
    assert_near(ours, theirs, 1e-6)
    slots = slots_by_name(optimizer, ours)
    assert {name: set(found) for name, found in slots.items()} == {
        name: {"momentum_buffer"} if name in matrices else {"step", "exp_avg", "exp_avg_sq"} for name in ours
    }


@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (6, 6)])
def test_an_orthogonalized_matrix_has_singular_values_near_1(shape: tuple[int, int]) -> None:
    """Between 0.6 and 1.3, as the iteration promises, with the singular vectors of the matrix itself."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(start, full_matrices=False)
    matrix = left @ torch.linspace(3.0, 0.3, min(shape)).diag() @ right
    found = left.T @ orthogonalized(matrix).float() @ right.T
    diagonal = found.diagonal()
    assert 0.6 < diagonal.min() <= diagonal.max() < 1.3
    assert (found - diagonal.diag()).abs().max() < 0.05


def test_muon_refuses_what_is_no_matrix() -> None:
    words = (
        r"use_muon is true for 'h.0.bias', whose shape is \[5\]; Muon updates matrices, which have two axes\. Remove"
    )
    with pytest.raises(ParametersError, match=words):
        make_optimizer(optimizer_of("Muon", [{"weights": "h.0.*", "use_muon": True}]), weights())
