import numpy as np
import pytest

from onward.data.epoch_order import EpochOrder
from onward.errors import ParametersError


def test_unshuffled_files_and_samples_stand_as_they_are():
    order = EpochOrder(False, 0)
    np.testing.assert_array_equal(order.files(4, 5), np.arange(5))
    assert order.samples(4, 2, 100) is None


def test_orders_are_permutations_that_differ_by_seed_epoch_and_file():
    order = EpochOrder(True, 1)
    drawn = [
        order.files(0, 50), order.files(1, 50), order.samples(0, 0, 50), order.samples(0, 1, 50),
        order.samples(1, 0, 50), EpochOrder(True, 2).samples(0, 0, 50), EpochOrder(True, 2).files(0, 50),
    ]  # fmt: skip
    for permutation in drawn:
        np.testing.assert_array_equal(np.sort(permutation), np.arange(50))
    assert len({tuple(permutation) for permutation in drawn}) == len(drawn)


def test_an_order_is_the_same_on_every_machine():
    """Written down once: a checkpoint made by an earlier version resumes at the same samples."""
    assert EpochOrder(True, 0).files(0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert EpochOrder(True, 7).samples(3, 2, 8).tolist() == [6, 0, 7, 1, 2, 3, 4, 5]


def test_every_place_is_equally_likely():
    """Chi-square of where sample 0 lands over 4000 epochs: 15 degrees of freedom, 99.9% below 37.7."""
    places = [int(np.flatnonzero(EpochOrder(True, 0).samples(epoch, 0, 16) == 0)[0]) for epoch in range(4000)]
    counts = np.bincount(places, minlength=16)
    assert ((counts - 250) ** 2 / 250).sum() < 37.7


def test_a_bad_seed_is_refused():
    for seed in (-1, 1.5, None):
        with pytest.raises(ParametersError, match="the seed of the data's order"):
            EpochOrder(True, seed)
