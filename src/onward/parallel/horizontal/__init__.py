"""Tensor parallelism at work: the collective operators of a rank's graph. Importing it registers them."""

from onward.parallel.horizontal import attention, loss, normalization, operators, random, tokens

__all__ = ["attention", "loss", "normalization", "operators", "random", "tokens"]
