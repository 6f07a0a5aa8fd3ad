"""What the server has done before ranks and commands are forked from it, so that none of them does it: imports, and a
first run.

Of the run nothing is left but what torch and onward keep in modules; no thread is, since a fork would lose it.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import pytest  # noqa: F401
import torch._dynamo  # that the constructor of an optimizer imports
import torch.distributed.fsdp

from onward import cli, runner  # noqa: F401
from onward.checkpoint import collective_save  # noqa: F401
from onward.commands import train, training  # noqa: F401
from onward.data.in_memory import InMemoryDataLoader
from onward.report import tensorboard  # noqa: F401
from tests import mlp


def train_once() -> None:
    """What is built once in a process is there now: tables of operators, decompositions, fake tensors."""
    with tempfile.TemporaryDirectory() as folder:
        first, _ = mlp.start(Path(folder))
        first.run(InMemoryDataLoader(mlp.data(8)))
        first.end_training()


torch.set_num_threads(1)
train_once()
gc.collect()
gc.freeze()
gc.get_freeze_count = lambda: 1  # Python counts by walking through all of them
