"""Lion against its formula."""

from __future__ import annotations

import numpy as np

from tests.optim.peers import UPDATES, give_gradients, optimizer_of, train, weights


def test_lion_equals_its_formula() -> None:
    """In float64, to 1e-6 of the largest element."""
    rate, decay, alpha, beta = 0.01, 0.1, 0.8, 0.95
    ours, start = weights(), weights()
    train(optimizer_of("Lion", [{"alpha": alpha, "beta": beta, "lambda": decay}]), ours, rate)
    found = {name: (weight.detach().numpy().astype(np.float64), 0.0) for name, weight in start.items()}
    for step in range(UPDATES):
        give_gradients(start, step)
        for name, (w, m) in found.items():
            gradient = start[name].grad
            assert gradient is not None
            g = gradient.numpy().astype(np.float64)
            found[name] = w - rate * (np.sign(alpha * m + (1 - alpha) * g) + decay * w), beta * m + (1 - beta) * g
    for name, (w, _) in found.items():
        assert np.abs(ours[name].detach().numpy() - w).max() <= 1e-6 * np.abs(w).max()
