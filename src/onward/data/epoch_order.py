"""The order in which an epoch reads files and samples: in their own order, or drawn from seed and epoch alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onward.errors import ParametersError


@dataclass(frozen=True)
class EpochOrder:
    """A stateless order: it depends on nothing but seed, epoch and file, so that a position in it can be resumed.

    Attributes:
        shuffle: False: files and samples in their own order.
        seed: of the shuffling, at least 0.
    """

    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        if type(self.seed) is not int or self.seed < 0:
            raise ParametersError(f"the seed of the data's order is {self.seed!r}; expected an integer of at least 0.")

    def files(self, epoch: int, count: int) -> np.ndarray:
        """Permutation, int64 [count], of the files for an epoch."""
        return self._permutation(count, 0, epoch) if self.shuffle else np.arange(count)

    def samples(self, epoch: int, file: int, count: int) -> np.ndarray | None:
        """Permutation, int64 [count], of the samples in a file (its number in the entire data set); None:
        unshuffled.
        """
        return self._permutation(count, 1, epoch, file) if self.shuffle else None

    def _permutation(self, count: int, *key: int) -> np.ndarray:
        # numpy keeps raw bit streams fixed over its versions, but not what Generator makes of them: sort raw keys.
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, *key]))
        return np.argsort(bits.random_raw(count), kind="stable")
