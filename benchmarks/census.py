"""Speed and memory of onward on every architecture of the coverage table: `python -m benchmarks.census [--page]`;
with `--held-out`, on networks that onward was not tuned by.

Each is trained by onward with its defaults from its ONNX export, by the same torch module in a plain eager loop, and
with `--compiled` by that loop under torch.compile: the same loss, batches, clipping and fused AdamW, one thread. The
eager process chooses a batch whose update takes 25 to 150 ms; a later run takes the batch that is recorded. The
processes take turns, two updates each. Ratios are medians over the rounds: by CPU time, which other load on the machine
changes little, and by the clock. All run on one core, since other work slows cores down unequally, and each way is
started several times, since one process may be faster than the next for as long as they live: a ratio is the median
over the starts. A JSON line for each architecture is kept; what is kept is measured again only with `--again`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import census_contestants, census_networks
from benchmarks.census_page import page, seconds_of_update, speed
from benchmarks.compare_environment import hardware
from benchmarks.compare_protocol import ForkedContestant
from onward.engine.network.compilation import RUNS_UNCOMPILED

ROWS = Path(__file__).parent / "results" / "census.jsonl"
HELD_OUT_ROWS = ROWS.with_name("census_held_out.jsonl")
PAGE = Path(__file__).parent / "census.md"
WAYS = ("onward", "onward uncompiled", "onward compiled", "compiled")
STARTS, ROUNDS, STEPS, WARM = 3, 5, 2, 1
SHORTEST_SECONDS = 0.015
"""CPU time of an eager update: below, too much of a ratio is the loop around the network."""


def measure(name: str, ways: Sequence[str], batch: int | None, profiles: Path | None) -> dict[str, Any]:
    """The row of an architecture.

    Args:
        name: of the architecture.
        ways: eager first, then onward or compiled, or both.
        batch: its size; None: the eager process finds one.
        profiles: a folder for the profile of an update of each way.
    """
    row: dict[str, Any] = {"name": name, "ways": {way: {"cpu": [], "wall": []} for way in ways}}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if batch is not None:
            (folder / "work.json").write_text(json.dumps({"batch": batch}))
        for _ in range(STARTS):
            begin_and_measure(row, folder)
            if "failure" in row["ways"]["eager"]:
                break
        if (folder / "work.json").exists():
            row |= json.loads((folder / "work.json").read_text())
        for path in folder.glob("*.profile") if profiles is not None else ():
            assert profiles is not None
            profiles.mkdir(parents=True, exist_ok=True)
            (profiles / f"{name}-{path.stem}.txt").write_text(path.read_text())
    return row


def begin_and_measure(row: dict[str, Any], folder: Path) -> None:
    """Adds the times of one process of each way to a row, and from the first processes all else that it holds."""
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    runners, losses = {}, {}
    for way, found in row["ways"].items():
        if "failure" in found:
            continue
        start = functools.partial(census_contestants.run, way, row["name"], folder)
        runner = runners[way] = ForkedContestant(way, start, environment, folder / f"{way}.log")
        first = runner.ask("steps 1")
        runner.pin(max(os.sched_getaffinity(0)))
        runner.ask(f"steps {WARM}")
        losses[way] = first["losses"] if first else []
        if first and "first_seconds" not in found:
            said = runner.log.read_text()
            found["first_seconds"] = round(first["wall"][0], 2)
            found |= {"is_compiled": "speed.compile: on" in said, "refusals": said.count(RUNS_UNCOMPILED)}
        for clock in ("cpu", "wall"):
            found[clock].append([])
        if runner.failure is not None and way == "eager":
            break
    for _ in range(ROUNDS):
        for way, runner in runners.items():
            answer = runner.ask(f"steps {STEPS}")
            if answer is not None:
                losses[way] += answer["losses"]
                for clock in ("cpu", "wall"):
                    row["ways"][way][clock][-1].append(round(statistics.median(answer[clock]), 6))
    for way, runner in runners.items():
        found = row["ways"][way]
        memory = runner.ask("memory") if "tensor_bytes" not in found else runner.ask("steps 1")
        if memory is None:
            found["failure"] = runner.failure
        elif "tensor_bytes" in memory:
            found |= {"tensor_bytes": memory["tensor_bytes"], "losses": losses[way], "is_repeated": True}
        else:
            found["is_repeated"] &= losses[way] == found["losses"]
        runner.end()


def recorded_batch(row: dict[str, Any] | None) -> int | None:
    """The batch of a row that was measured before; None: there is none, or its update was too short."""
    if row is None or "batch" not in row or "failure" in row["ways"]["eager"]:
        return None
    is_long = seconds_of_update(row, "eager") >= SHORTEST_SECONDS
    return int(row["batch"]) if is_long else None


def import_all() -> None:
    """What contestants would each import for themselves; nothing of it may start a thread before they are forked."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for name in ("transformers", "torch.onnx", "onnxscript", "onward", "onward.engine.building.assembly"):
        importlib.import_module(name)


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> its last row."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {row["name"]: row for row in rows}


def write_rows(path: Path, rows: dict[str, dict[str, Any]], order: Sequence[str]) -> None:
    """One line an architecture, in the order of the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(rows[name]) + "\n" for name in order if name in rows))


def summary(row: dict[str, Any]) -> str:
    """A line for the console."""
    failures = [f"{way}: {found['failure']}" for way, found in row["ways"].items() if "failure" in found]
    if failures:
        return f"{row['name']:24} {'; '.join(failures)}"
    own = row["ways"].get("onward")
    parts = [f"{row['name']:24} batch {row['batch']:5}"]
    for way, found in row["ways"].items():
        parts.append(f"{way} {seconds_of_update(row, way) * 1e3:.1f} ms")
        if own is not None and way != "onward":
            parts.append(f"({speed(row, way):.2f}, memory {own['tensor_bytes'] / found['tensor_bytes']:.2f})")
    return " ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; by default all")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile; by default for every third of all")
    parser.add_argument("--ways", nargs="+", default=[], help=f"measure these instead, beside eager: {WAYS}")
    parser.add_argument("--held-out", action="store_true", help="networks that onward was not tuned by")
    parser.add_argument("--again", action="store_true", help="measure again what is kept, at the recorded batch")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no architecture after so long")
    parser.add_argument("--profiles", type=Path, help="a folder for the profile of an update of each way")
    parser.add_argument("--rows", type=Path, help="where rows are kept")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} from the rows")
    options = parser.parse_args()
    kept = options.rows or (HELD_OUT_ROWS if options.held_out else ROWS)
    order = census_networks.names(options.held_out)
    unknown = set(options.names) - set(order)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: none of {', '.join(order)}")
    if wrong := set(options.ways) - set(WAYS):
        parser.error(f"{', '.join(sorted(wrong))}: none of {', '.join(WAYS)}")
    ways = ["eager", *(options.ways or ["onward", *(["compiled"] if options.compiled else [])])]
    names = options.names or (order[::3] if options.compiled and not options.held_out else order)
    import_all()
    started = time.monotonic()
    for name in names:
        rows = read_rows(kept)
        known = rows.get(name)
        if known is not None and not options.again and set(ways) <= set(known["ways"]):
            continue
        if time.monotonic() - started > options.seconds:
            break
        row = measure(name, ways, recorded_batch(known), options.profiles)
        row |= {"machine": hardware("cpu", 1), "load": round(os.getloadavg()[0], 1)}
        print(summary(row), flush=True)
        rows = read_rows(kept)
        rows[name] = row
        write_rows(kept, rows, order)
    if options.page:
        rows = read_rows(ROWS if options.held_out else kept)
        PAGE.write_text(page(rows, read_rows(HELD_OUT_ROWS), census_networks.LEFT_OUT))


if __name__ == "__main__":
    main()
