"""Whether samples come in the order of their labels, so that batches of neighbors would hold one label only.

Labels in a random order form a number of runs of equal neighbors that is known (Wald and Wolfowitz, for any number of
classes); sorted ones form as few as there are classes.
"""

from __future__ import annotations

import numpy as np

from onward.proposal.data_facts import Feature

FEWEST_LABELS = 8
FEWEST_OF_A_CLASS = 4
"""On average: with fewer, the numbers of a label are no classes."""
FEWEST_DEVIATIONS = 4.0
"""By which the runs are fewer than those of random labels, of which 1 in 30,000 tables has so few."""
LEAST_CORRELATION = 0.95
"""Between the ranks of numbers and their places, from which on they count as nearly sorted."""


def order_of_labels(label: Feature, sample_count: int) -> str:
    """What is to be said of the order of samples that have to be shuffled; "" where their labels are mixed.

    Args:
        label: of the samples that were seen.
        sample_count: of all.
    """
    labels = label.codes if label.values is None else label.values
    if labels is None or labels.ndim != 1 or len(labels) < FEWEST_LABELS:
        return ""
    classes, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    count = len(codes)
    if len(classes) == 1:
        return f"have one label in the first {count:,} of {sample_count:,}" if count < sample_count else ""
    if len(classes) * FEWEST_OF_A_CLASS > count:
        return "" if label.values is None else _order_of_numbers(codes)
    runs = 1 + int((codes[1:] != codes[:-1]).sum())
    if runs == len(classes):
        return "are sorted by label"
    expected, deviation = _random_runs(counts.astype(np.float64))
    if runs <= expected / 2 and expected - runs > FEWEST_DEVIATIONS * deviation:
        return f"are nearly sorted by label ({count:,} of them form {runs:,} runs of equal labels)"
    return ""


def _random_runs(counts: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of the number of runs in a random order of so many labels of each class."""
    count, squares, cubes = counts.sum(), (counts**2).sum(), (counts**3).sum()
    mean = 1 + count - squares / count
    variance = squares * (squares + count * (count + 1)) - 2 * count * cubes - count**3
    return float(mean), float(np.sqrt(max(variance, 0.0) / (count**2 * (count - 1))))


def _order_of_numbers(ranks: np.ndarray) -> str:
    steps = np.diff(ranks)
    if bool((steps >= 0).all() or (steps <= 0).all()):
        return "are sorted by label"
    correlation = float(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1])
    return "are nearly sorted by label" if abs(correlation) > LEAST_CORRELATION else ""
