"""What it costs to watch for slow ranks and silent corruption, on disk and in memory, as a share of an update.

    python -m benchmarks.watching_overhead [--processes 2] [--updates 60]

A check is timed by itself, at every update, and its share is that time over the updates between two checks at the
default period. Checksums of shards are timed where their bytes are read, in the thread that reads ahead, and charged to
the updates of the first epoch alone, the only one that computes them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from tests.invariants.cases import IGNORING, TRANSFORMER, Case, gpt2, tokens
from tests.invariants.layouts import Layout, merged_sections, rows_of_replica
from tests.ranks import run_on_ranks

from onward.data import shard
from onward.data.in_memory import InMemoryDataLoader
from onward.data.loader import DataLoader
from onward.data.packing.options import PackOptions
from onward.data.packing.packer import pack
from onward.data.shard_format import new_checksum
from onward.engine.faults.slow_ranks import SlowRanks
from onward.environment import Environment
from onward.models import create_model
from onward.parameters import Parameters
from onward.parameters.distributed import Distributed
from onward.parameters.speed import Machine
from onward.runner import TrainingRunner
from onward.training_round import TrainingRound

MODEL = {**TRANSFORMER, "width": 256, "layers": 4}
"""3.2 M parameters on samples of a dozen tokens: few tokens make an update cheap, and a check a large share of it."""


class _TimedChecksum:
    """A checksum of a shard that adds up what its updates take."""

    def __init__(self, checks: list[float]) -> None:
        self._own = new_checksum()
        self._checks = checks

    def update(self, content: memoryview) -> None:
        started = time.perf_counter()
        self._own.update(content)
        self._checks.append(time.perf_counter() - started)

    def hexdigest(self) -> str:
        return self._own.hexdigest()


def timed(
    sections: dict[str, Any], rows: dict[str, Any], replicas: int, batch: int, shards: Path
) -> tuple[list[float], list[float]]:
    """Seconds of every update without its checks, and of every check, on this rank; `rows` empty: data from shards."""
    runner = TrainingRunner(
        Parameters.from_mapping(sections), Environment(execution_provider="CPU", threads=1), progress=False
    )
    place = torch.distributed.get_rank()
    data: Any = (
        InMemoryDataLoader(rows_of_replica(rows, place, replicas, batch))
        if rows
        else DataLoader({}, shards, rank=place, size=replicas)
    )
    runner.initialize(data.feature_specs())
    checks: list[float] = []
    shard.new_checksum = lambda: _TimedChecksum(checks)  # type: ignore[assignment, attr-defined, return-value]

    def timing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            found = method(*arguments)
            checks.append(time.perf_counter() - started)
            return found

        return call

    from onward.engine.faults import integrity

    SlowRanks._compare = timing(SlowRanks._compare)  # type: ignore[method-assign]
    for name in ("check", "at_rest"):
        setattr(integrity.StateDigests, name, timing(getattr(integrity.StateDigests, name)))
    updates: list[float] = []
    steps = TrainingRound._steps

    def stepping(*arguments: Any) -> Iterator[Any]:
        inner = steps(*arguments)
        while True:
            before, started = sum(checks), time.perf_counter()
            done = next(inner, None)
            if done is None:
                return
            updates.append(time.perf_counter() - started - (sum(checks) - before))
            yield done

    TrainingRound._steps = stepping  # type: ignore[assignment, method-assign]
    runner.run(data)
    return updates[2:], checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--updates", type=int, default=60)
    asked = parser.parse_args()
    batch, layout = 4 * asked.processes, Layout(asked.processes, 1, 1)
    rows = tokens(batch * asked.updates)
    print(f"{'check':<28}{'ms a check':>12}{'ms an update':>14}{'period':>8}{'share':>10}")
    kinds = [
        ("slow ranks", "distributed", "slow_rank_period", Distributed().slow_rank_period),
        ("digests of the state", "machine", "check_weights_period", Machine().check_weights_period),
        ("checksums of shards", "", "", 1),
    ]
    total = 0.0
    for title, section, field, period in kinds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ir.save(create_model("gpt2", **MODEL, dropout=0.0), folder / "model.onnx")
            sections = merged_sections(Case(gpt2, IGNORING, tokens), layout, folder, batch, asked.updates, 1, {})
            sections["distributed"] |= {"slow_rank_period": 0}
            sections["machine"] = {"check_weights_period": 0}
            if section:
                sections[section][field] = 1
            shards, given = _packed(folder, rows, asked.processes), rows if section else {}
            updates, checks = run_on_ranks(asked.processes, timed, sections, given, asked.processes, batch, shards)[0]
        update = statistics.median(updates)
        check = sum(checks) / asked.updates
        share = check / period / update
        total += share
        print(f"{title:<28}{1000 * check:>12.2f}{1000 * update:>14.1f}{period:>8}{share:>10.3%}")
    print(f"{'total':<28}{'':>34}{total:>10.3%}")


def _packed(folder: Path, rows: dict[str, Any], files: int) -> Path:
    """The same data in shards with checksums, one for each replica."""
    np.savez(folder / "rows.npz", **rows)
    count = -(-len(next(iter(rows.values()))) // files)
    pack(folder / "rows.npz", folder / "shards", PackOptions(samples_per_file=count, progress=False))
    return folder / "shards"


if __name__ == "__main__":
    main()
