"""What `onward init` says of the order of a table's rows: of generated tables, as they are, sorted, shuffled."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from onward.proposal.data_facts import Feature
from onward.proposal.data_reading import read_data_facts
from onward.proposal.label_order import order_of_labels

SEEDS = range(40)


def labels_of(classes: int, rows: int, draw: np.random.Generator) -> np.ndarray:
    """Each class at least once, in proportions that may be very unequal."""
    shares = draw.dirichlet(np.full(classes, draw.choice([0.5, 1.0, 10.0])))
    return np.concatenate([np.arange(classes), draw.choice(classes, size=rows - classes, p=shares)])


def label_of(values: np.ndarray) -> Feature:
    return Feature(name="y", dtype="int64", shape=(), values=values)


def order(labels: np.ndarray, tmp_path: Path, words: bool = False) -> str:
    """What is said of a table with these labels, read from a file."""
    cells = [f"class {value}" for value in labels] if words else [str(value) for value in labels.tolist()]
    path = tmp_path / "table.csv"
    path.write_text("x,y\n" + "".join(f"{index * 0.37 % 1:.4f},{cell}\n" for index, cell in enumerate(cells)))
    data = read_data_facts(path)
    label = data.feature("y")
    assert label is not None
    assert (label.values is None) == words
    return order_of_labels(label, data.sample_count)


@pytest.mark.parametrize("words", [False, True], ids=["numbers", "words"])
@pytest.mark.parametrize("rows", [24, 60, 400])
@pytest.mark.parametrize("classes", [2, 3, 6])
def test_shuffled_rows_are_not_called_sorted_and_sorted_ones_are(
    classes: int, rows: int, words: bool, tmp_path: Path
) -> None:
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        labels = labels_of(classes, rows, draw)
        for name, groups in (("ascending", np.sort(labels)), ("descending", np.sort(labels)[::-1])):
            assert order(groups, tmp_path, words) == "are sorted by label", (seed, name)
        mixed = draw.permutation(labels)
        runs = 1 + int((mixed[1:] != mixed[:-1]).sum())
        said = order(mixed, tmp_path, words)
        assert said == ("are sorted by label" if runs == classes else ""), (seed, mixed)


@pytest.mark.parametrize("words", [False, True], ids=["numbers", "words"])
def test_nearly_sorted_rows(words: bool, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    labels = np.sort(np.arange(300) % 3)
    for exchanged in (1, 5, 15):
        nearly = labels.copy()
        for a, b in draw.integers(0, len(nearly), size=(exchanged, 2)):
            nearly[[a, b]] = nearly[[b, a]]
        assert order(nearly, tmp_path, words).startswith("are nearly sorted by label (300 of them form ")
    blocks = np.repeat(np.arange(100) % 3, 4)  # 0 0 0 0 1 1 1 1 2 2 2 2 0 0 0 0 ...
    assert "form 100 runs" in order(blocks, tmp_path, words)
    assert order(np.arange(300) % 3, tmp_path, words) == "", "0 1 2 0 1 2 is mixed better than at random"


def test_numbers_that_are_no_classes(tmp_path: Path) -> None:
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        values = draw.normal(size=100).round(6)
        assert order(values, tmp_path) == ""
        assert order(np.sort(values), tmp_path) == order(np.sort(values)[::-1], tmp_path) == "are sorted by label"
        nearly = np.sort(values)
        nearly[[3, 60]] = nearly[[60, 3]]
        assert order(nearly, tmp_path) == "are nearly sorted by label"
        assert order(np.sin(np.arange(100) / 9) + 0.01 * values, tmp_path) == ""


def test_words_of_which_each_is_different_have_no_order(tmp_path: Path) -> None:
    assert order(np.arange(100), tmp_path, words=True) == ""


@pytest.mark.parametrize("words", [False, True], ids=["numbers", "words"])
def test_one_label_and_few_rows(words: bool, tmp_path: Path) -> None:
    assert order(np.zeros(50, int), tmp_path, words) == ""
    assert order(np.array([0, 0, 0, 1, 1, 1]), tmp_path, words) == ""
    seen = label_of(np.zeros(512, np.int64))
    assert order_of_labels(seen, 100_000) == "have one label in the first 512 of 100,000"


def test_the_probability_of_a_wrong_word_is_small() -> None:
    """Of 3,000 random orders none is called nearly sorted."""
    draw = np.random.default_rng(1)
    for _ in range(3000):
        classes = int(draw.integers(2, 6))
        labels = draw.permutation(labels_of(classes, int(draw.integers(40, 200)), draw))
        assert "nearly" not in order_of_labels(label_of(labels), len(labels))


def test_the_expected_number_of_runs_is_that_of_random_orders() -> None:
    from onward.proposal.label_order import _random_runs

    draw, counts = np.random.default_rng(2), np.array([30.0, 5.0, 12.0])
    labels = np.repeat(np.arange(3), counts.astype(int))
    runs = [1 + int((np.diff(draw.permutation(labels)) != 0).sum()) for _ in range(4000)]
    mean, deviation = _random_runs(counts)
    assert np.mean(runs) == pytest.approx(mean, abs=5 * deviation / math.sqrt(len(runs)))
    assert np.std(runs) == pytest.approx(deviation, rel=0.05)


def test_labels_that_were_not_seen_have_no_order() -> None:
    assert order_of_labels(Feature(name="y", dtype="words", shape=()), 100) == ""
