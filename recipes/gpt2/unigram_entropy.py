"""Prints the unigram entropy of packed tokens: the loss of the best model that knows only how frequent a token is.

`python unigram_entropy.py data/train`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from onward.data import load_shard


def unigram_entropy(folder: Path, feature: str) -> tuple[float, int]:
    """Entropy in nats per token, and the number of tokens, of an integer feature in all shards of a folder."""
    counts = np.zeros(0, dtype=np.int64)
    for path in sorted(folder.glob("*.pb")):
        tokens = load_shard(path, {feature: feature}).features[feature]
        counted = np.bincount(np.asarray(tokens).reshape(-1), minlength=len(counts))
        counted[: len(counts)] += counts
        counts = counted
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum()), int(counts.sum())


def main() -> None:
    """Reads the command line and prints one sentence."""
    parser = argparse.ArgumentParser(description="Entropy of single tokens, a bound that a model must fall below.")
    parser.add_argument("folder", type=Path, help="a folder of shards")
    parser.add_argument("--feature", default="labels", help="the feature that holds tokens (default: %(default)s)")
    options = parser.parse_args()
    if not any(options.folder.glob("*.pb")):
        parser.error(f"{str(options.folder)!r} holds no shards; run onward pack first, as README.md says")
    entropy, count = unigram_entropy(options.folder, options.feature)
    sys.stdout.write(f"unigram entropy: {entropy:.3f} nats per token, over {count:,} tokens\n")


if __name__ == "__main__":
    main()
