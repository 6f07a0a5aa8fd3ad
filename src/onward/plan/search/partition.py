"""Cutting a line of blocks into stages so that the slowest is as fast as can be, for all numbers of stages at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onward.plan.search.network import Numbers


def best_cuts(cost: Numbers, sent: Numbers, most: int) -> list[NDArray[np.int64]]:
    """By dynamic programming over (stages so far, blocks so far).

    Args:
        cost: of each block.
        sent: cost of what is sent after each block.
        most: stages.

    Returns:
        By number of stages, from 0 to `most`, where they begin, and the end.
    """
    count = len(cost)
    total = np.concatenate([[0.0], np.cumsum(cost)])
    crossing = np.concatenate([[0.0], sent[:-1], [0.0]])
    stage = total[None, :] - total[:, None] + crossing[None, :] + crossing[:, None]  # from a beginning to an end
    stage[np.tril_indices(count + 1)] = np.inf
    slowest = np.full(count + 1, np.inf)
    slowest[0] = 0.0
    came_from: list[NDArray[np.int64]] = []
    found = [np.zeros(1, dtype=np.int64)]
    for _ in range(most):
        worst = np.maximum(slowest[:, None], stage)
        came_from.append(worst.argmin(axis=0))
        slowest = worst[came_from[-1], np.arange(count + 1)]
        cuts = [count]
        for row in reversed(came_from):
            cuts.append(int(row[cuts[-1]]))
        found.append(np.array(cuts[::-1], dtype=np.int64))
    return found
