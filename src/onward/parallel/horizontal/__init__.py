"""Horizontal parallelism at work: the collective operators of a rank's graph. Importing it registers them.

`connect` names the process group, once, before such a graph runs.
"""

from onward.parallel.horizontal import attention, loss, operators, random, tokens
from onward.parallel.horizontal.collectives import connect

__all__ = ["attention", "connect", "loss", "operators", "random", "tokens"]
