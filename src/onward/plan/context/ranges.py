"""Which elements of a cut axis a context rank holds: every block in 2C chunks, of which rank r has r and 2C - 1 - r.

So every rank has early and late tokens, and the ranks have equally much to do where a token looks at earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence


def chunk_size(block: int, size: int) -> int:
    """The length of a block's chunks; the last ones may be shorter, or empty."""
    return -(-block // (2 * size))


def ranges_of(block: int, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """The elements [start, end) of a block that a rank holds, in their order; empty ranges are left out."""
    chunk = chunk_size(block, size)
    found = ((min(k * chunk, block), min((k + 1) * chunk, block)) for k in (rank, 2 * size - 1 - rank))
    return tuple((start, end) for start, end in found if end > start)


def local_size(blocks: Sequence[int], rank: int, size: int) -> int:
    """How many elements of an axis made of blocks a rank holds."""
    return sum(end - start for block in blocks for start, end in ranges_of(block, rank, size))


def blocks_of(length: int, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks of an axis of this length; equal ones may be more or fewer than planned, since a batch may be short.

    Raises:
        ValueError: the blocks do not make up the axis.
    """
    if sum(blocks) == length:
        return blocks
    if len(blocks) > 1 and len(set(blocks)) == 1 and length % blocks[0] == 0:
        return blocks[:1] * (length // blocks[0])
    raise ValueError(
        f"context parallelism was planned for sequences of {blocks[0]}, but this batch has {length}. Pad or cut all "
        f"sequences, of training and of test data, to {blocks[0]}."
    )
