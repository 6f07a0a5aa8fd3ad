"""What is in memory at the peak of an update: `python -m benchmarks.memory_timeline MODEL:SIZE [--eager]`.

Trains a network of `benchmarks.compare`, or `census:NAME` of `benchmarks.census`, for three updates and lists, for the
third, the tensors that are alive at its peak: bytes, how many of a kind, the operator that allocated them and the line
that called it. What was there before the update has the operator `aten.detach`. Compiled code allocates unseen.
"""

from __future__ import annotations

import argparse
import json
import linecache
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare_contestants import Task, fields_of, make_by_hand, make_onward, prepare
from benchmarks.compare_networks import SIZES, make_network
from onward.engine.forecast.allocations import Allocations

Kind = tuple[str, str]
"""Operator with shape, and the line that called it."""


class Timeline(Allocations):
    """A log of allocations that knows where each came from."""

    def __init__(self) -> None:
        super().__init__(counts_fakes=False)
        self.kinds: dict[int, Kind] = {}
        self._kind: Kind = ("before", "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator under its name."""
        self._kind = (str(func), "")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        """Counts a tensor, with its shape."""
        if tensor.untyped_storage() not in self._numbers and self._kind[0] != "before":
            self._kind = (f"{self._kind[0].split(' ')[0]} {list(tensor.shape)}", calling_line())
        super().note(tensor, kind)

    def _number(self, storage: torch.UntypedStorage) -> int:
        number = super()._number(storage)
        self.kinds.setdefault(number, self._kind)
        return number

    def totals(self) -> list[float]:
        """Bytes alive after every event."""
        sizes: dict[int, float] = {}
        total, found = 0.0, []
        for number, size in self._events:
            total += size - sizes.get(number, 0.0)
            sizes[number] = size
            found.append(total)
        return found

    def alive_after(self, place: int) -> tuple[Counter[Kind], Counter[Kind]]:
        """Bytes by kind after the event of this place, and how many tensors."""
        sizes = dict(self._events[: place + 1])
        total: Counter[Kind] = Counter()
        count: Counter[Kind] = Counter()
        for number, size in sizes.items():
            if size:
                total[self.kinds[number]] += int(size)
                count[self.kinds[number]] += 1
        return total, count


def calling_line() -> str:
    """The innermost line of generated code or of onward; in a backward pass, that of onward."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith("<eval_with_key>"):
            line = linecache.getline(frame.filename, frame.lineno or 0) or frame.line or ""
            return line.strip().split(";")[0][:110]
        if "/onward/" in frame.filename and "allocations.py" not in frame.filename:
            return f"{frame.filename.split('/onward/')[-1]}:{frame.lineno} {frame.name}"
    return ""


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", metavar="MODEL:SIZE")
    parser.add_argument("--eager", action="store_true", help="the network by hand instead of onward")
    parser.add_argument("--top", type=int, default=25, help="lines to print")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, _, size = options.task.partition(":")
    if model == "census":
        with tempfile.TemporaryDirectory() as folder:
            report(make_of_census(size, options.eager, Path(folder)), options.top)
        return
    task = Task(model, size, "cpu", False, True, options.threads)
    if options.eager:
        report(make_by_hand(task, make_network(model, SIZES[model][size]), compiled=False), options.top)
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(task, Path(folder))
        report(make_onward(task, Path(folder), fields_of("onward", task)), options.top)


def make_of_census(name: str, is_eager: bool, folder: Path) -> Any:
    """An update of an architecture, with the batch of its published row."""
    from benchmarks import census_contestants, census_networks
    from benchmarks.census import ROWS

    rows = {row["name"]: row for row in map(json.loads, ROWS.read_text().splitlines())}
    (folder / "work.json").write_text(json.dumps({"batch": rows[name]["batch"]}))
    one = census_networks.enlarged(name)
    census_contestants.prepare(one, folder)
    return census_contestants.make_step("eager" if is_eager else "onward", one, folder)


def report(step: Any, top: int) -> None:
    """Prints the third update's peak."""
    import gc

    step(0)
    step(1)
    gc.collect()
    log = Timeline()
    with log:
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
                log.note(thing.detach())
        held = log.now - 1
        step(2)
    totals = log.totals()
    peak = max(range(held, len(totals)), key=totals.__getitem__)
    print(f"held before the update {totals[held] / 1e6:9.2f} MB")
    print(f"peak                   {totals[peak] / 1e6:9.2f} MB")
    total, count = log.alive_after(peak)
    for kind, found in total.most_common(top):
        print(f"{found / 1e6:9.2f} MB  {count[kind]:4} x  {kind[0]:60}  {kind[1]}")


if __name__ == "__main__":
    main()
