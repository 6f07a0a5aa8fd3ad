"""Adam and AdamW without bias correction, against their formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onward.optim.building import make_optimizer, set_learning_rate
from tests.optim.peers import give_gradients, optimizer_of, weights


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("field", ["optimizer_attributes", "optimizer_int_attributes"])
def test_20_updates_without_bias_correction(name: str, field: str) -> None:
    """What the original program for BERT computed, against its formula in float64, to 1e-6 of the largest element.

    One weight keeps the correction: it equals torch's to 1e-6.
    """
    rate, decay, alpha, beta, epsilon = 0.01, 0.1, 0.9, 0.98, 1e-6
    rules = [{"alpha": alpha, "beta": beta, "lambda": decay, "epsilon": epsilon}]
    switches = [{"do_bias_correction": 0}, {"weights": "norm.weight", "do_bias_correction": 1}]
    if field == "optimizer_attributes":
        rules += [{**rule, "do_bias_correction": bool(rule["do_bias_correction"])} for rule in switches]
        settings = optimizer_of(name, rules)
    else:
        settings = optimizer_of(name, rules, optimizer_int_attributes=switches)
    ours, start = weights(), weights()
    optimizer = make_optimizer(settings, ours)
    kind = torch.optim.AdamW if name == "AdamW" else torch.optim.Adam
    corrected = start["norm.weight"]
    peer = kind([corrected], lr=rate, betas=(alpha, beta), eps=epsilon, weight_decay=decay)
    formulas = {key: [weight.detach().numpy().astype(np.float64), 0.0, 0.0] for key, weight in start.items()}
    for step in range(20):
        give_gradients(ours, step)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        corrected.grad = ours["norm.weight"].grad
        peer.step()
        for key, (w, m, v) in formulas.items():
            gradient = ours[key].grad
            assert gradient is not None
            g = gradient.numpy().astype(np.float64) + (0 if name == "AdamW" else decay * w)
            m, v = alpha * m + (1 - alpha) * g, beta * v + (1 - beta) * g**2
            move = m / (np.sqrt(v) + epsilon) + (decay * w if name == "AdamW" else 0)
            formulas[key] = [w - rate * move, m, v]
    for key, (w, _, _) in formulas.items():
        expected = corrected.detach().numpy() if key == "norm.weight" else w
        assert np.abs(ours[key].detach().numpy() - expected).max() <= 1e-6 * np.abs(expected).max(), key
