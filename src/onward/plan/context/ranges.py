"""Which elements of a cut axis a context rank holds: every block in 2C chunks, of which rank r has r and 2C - 1 - r.

So every rank has early and late tokens, and the ranks have equally much to do where a token looks at earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onward.plan.shards import Sharding


@dataclass(frozen=True)
class TokenCut(Sharding):
    """An axis of tokens that context ranks share.

    Attributes:
        rows: elements of the axis that every token has, as an axis [time * batch] has one for each sample. A block of
            n elements is divided as n / rows tokens are.
    """

    rows: int = 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """The blocks, counted in tokens."""
        return tuple(block // self.rows for block in self.blocks)

    def along(self, axis: int) -> TokenCut:
        """The same cut of an axis of another value."""
        return TokenCut(axis, self.blocks, self.parts, self.rows)


@dataclass(frozen=True)
class TokenAxis:
    """A cut axis in a batch of any number of samples.

    Attributes:
        blocks: in tokens; those of one sample where `samples` is "outer".
        rows: elements of a token; those of one sample where `samples` is "inner".
        samples: where the axis has those of a batch: as further blocks ("outer", [batch * time]), as further rows
            ("inner", [time * batch]), or not at all ("none").
    """

    blocks: tuple[int, ...]
    rows: int = 1
    samples: str = "none"

    def of_length(self, length: int) -> TokenAxis:
        """The axis in a batch in which it has so many elements.

        Raises:
            ValueError: tokens of the planned number cannot be so many elements.
        """
        return self._times(length, sum(self.blocks) * self.rows)

    def of_part(self, length: int, rank: int, size: int) -> TokenAxis:
        """The axis in a batch in which a rank has so many elements of it."""
        return self._times(length, local_size(self.blocks, rank, size) * self.rows)

    def _times(self, length: int, planned: int) -> TokenAxis:
        if length == planned and self.samples == "none":
            return self
        if self.samples == "none" or length % planned:
            raise ValueError(
                f"context parallelism was planned for sequences of {self.blocks[0]}, but this batch has {length}. Pad "
                f"or cut all sequences, of training and of test data, to {self.blocks[0]}."
            )
        count = length // planned
        if self.samples == "outer":
            return TokenAxis(self.blocks * count, self.rows)
        return TokenAxis(self.blocks, self.rows * count)

    @property
    def length(self) -> int:
        """Elements of the axis."""
        return sum(self.blocks) * self.rows

    def local_length(self, rank: int, size: int) -> int:
        """How many elements of the axis a rank holds."""
        return local_size(self.blocks, rank, size) * self.rows


def axis_of(cut: TokenCut, samples: int) -> TokenAxis | None:
    """What a cut that was found for a batch of `samples` is for others; None where that is not known.

    Args:
        cut: of a batch of so many samples.
        samples: a prime number that divides no size of the model; 0: all batches have the same size.
    """
    tokens = cut.tokens
    if not samples or not tokens:
        return TokenAxis(tokens, cut.rows)
    own = tokens[: len(tokens) // samples]
    if own * samples == tokens:
        return TokenAxis(own, cut.rows, "outer") if cut.rows % samples else None
    if any(block % samples == 0 for block in tokens):
        return None
    return TokenAxis(tokens, cut.rows // samples, "inner") if cut.rows % samples == 0 else TokenAxis(tokens, cut.rows)


def chunk_size(block: int, size: int) -> int:
    """The length of a block's chunks; the last ones may be shorter, or empty."""
    return -(-block // (2 * size))


def ranges_of(block: int, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """The tokens [start, end) of a block that a rank holds, in their order; empty ranges are left out."""
    chunk = chunk_size(block, size)
    found = ((min(k * chunk, block), min((k + 1) * chunk, block)) for k in (rank, 2 * size - 1 - rank))
    return tuple((start, end) for start, end in found if end > start)


def local_size(blocks: Sequence[int], rank: int, size: int) -> int:
    """How many tokens of an axis made of blocks a rank holds."""
    return sum(end - start for block in blocks for start, end in ranges_of(block, rank, size))
