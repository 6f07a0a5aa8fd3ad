"""A rank that fails with any exception, at any moment, in any layout: all ranks end soon, and its words are shown."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from onward.cli import main
from onward.engine.evaluating.evaluation import Evaluator
from onward.engine.state import TrainState
from onward.errors import DataError, OnwardError
from onward.parallel.watch.ending import is_echo, words
from onward.runner import TrainingRunner
from tests.mlp import data, save_mlp, write_shards
from tests.parallel.starting import free_port
from tests.ranks import _CONTEXT
from tests.test_cli import write_run

LONGEST_SECONDS = 90.0
LAYOUTS = {"1x2x1": "horizontal", "2x1x1": "data", "1x1x2": "pipeline"}
MOMENTS: dict[str, tuple[Any, str]] = {
    "forward": (torch.nn.Module, "_call_impl"),
    "backward": (torch.autograd, "backward"),
    "update": (TrainState, "after_update"),
    "evaluation": (Evaluator, "evaluate"),
    "checkpoint": (TrainState, "sharded_tensors"),
    "end": (TrainingRunner, "end_training"),
}
QUICK = {("1x2x1", "backward"), ("2x1x1", "checkpoint"), ("1x1x2", "forward")}


class WithoutWordsError(Exception):
    """Cannot even be shown."""

    def __str__(self) -> str:
        raise ValueError("no words")


def random_error(seed: int, text: str) -> BaseException:
    """An exception with these words, in the midst of others that are its causes, contexts or members of groups."""
    draw = random.Random(seed)
    kinds: list[Callable[[str], BaseException]] = [RuntimeError, KeyError, DataError, OnwardError, OSError]
    others = [draw.choice(kinds)(f"other {number}") for number in range(draw.randrange(1, 6))]
    others.append(WithoutWordsError())
    error = draw.choice(kinds)(text)
    for _ in range(draw.randrange(3)):
        members = [one for one in (error, *others[:2]) if isinstance(one, Exception)]
        others.append(ExceptionGroup("several", members))
    for one in (error, *others):  # circles are likely
        one.__cause__, one.__context__ = (draw.choice([None, error, *others]) for _ in range(2))
        if draw.random() < 0.5:
            one.add_note("a note")
    return error


@pytest.mark.parametrize("seeds", [range(300)], ids=str)
def test_any_chain_is_named_and_is_no_echo(seeds: Iterable[int]) -> None:
    for seed in seeds:
        error = random_error(seed, f"fault {seed}")
        assert f"fault {seed}" in words(error)
        assert not is_echo(error)
    assert words(WithoutWordsError()) == "WithoutWordsError"


def _fail_at(moment: str, seed: int, text: str) -> None:
    """From now on this process fails at a moment."""
    owner, name = MOMENTS[moment]
    usual = getattr(owner, name)

    def fail(*_: Any, **__: Any) -> NoReturn:
        setattr(owner, name, usual)
        raise random_error(seed, text)

    setattr(owner, name, fail)


def _rank(rank: int, port: int, folder: str, moment: str, seed: int) -> None:
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shown = os.open(f"rank{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(shown, 1)
    os.dup2(shown, 2)
    if rank == seed % 2:
        _fail_at(moment, seed, f"fault {seed}")
    os._exit(main(["train", "run.yaml"]))


@pytest.mark.parametrize(
    ("layout", "moment"),
    [
        pytest.param(layout, moment, marks=[] if (layout, moment) in QUICK else pytest.mark.slow)
        for layout in LAYOUTS
        for moment in MOMENTS
    ],
)
def test_all_ranks_end_and_name_the_fault(layout: str, moment: str, tmp_path: Path) -> None:
    save_mlp(tmp_path)
    for number, folder in enumerate(("train", "test")):
        write_shards(tmp_path / folder, data(24, seed=number))
    seed = random.Random(layout + moment).randrange(10_000)
    write_run(
        tmp_path,
        distributed={f"{LAYOUTS[layout]}_parallel_size": 2},
        training={"gradient_accumulation_steps": 2, "evaluation_period": 4},
        checkpoint={"checkpoint_period": 1},
    )
    port = free_port()
    ranks = [_CONTEXT.Process(target=_rank, args=(rank, port, str(tmp_path), moment, seed)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + LONGEST_SECONDS
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    shown = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert None not in codes, f"hangs: {shown}"
    assert codes[0] == codes[1] in (1, 2), shown
    assert f"fault {seed}" in shown[seed % 2]
    assert f"rank {seed % 2} of 2" in shown[seed % 2]
    assert "Traceback" not in shown[1 - seed % 2]
