"""Which architectures train in stock ONNX Runtime: `python -m benchmarks.coverage --steps [--match TEXT] [--again]`.

For every architecture of the table, `onward device` writes the bundle of its export, whose steps are compared with
those of the torch module: the loss, and every new weight and running statistic. Each is a line in a file; what is there
already is not computed again, so that an interrupted run continues.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

from onward.errors import chain_of

RESULTS = Path("build") / "step_coverage.jsonl"
PAGE = Path(__file__).with_name("step_coverage.md")


def compare_all_steps(match: str, again: bool, results: Path = RESULTS) -> None:
    """Compares the steps of every architecture that no line is there of, and prints the table."""
    from tests.device.architecture_steps import RELATIVE
    from tests.lowering.architectures import ARCHITECTURES

    results.parent.mkdir(parents=True, exist_ok=True)
    found = read(results)
    for one in ARCHITECTURES:
        if match in one.name and (again or one.name not in found):
            found[one.name] = _row(one)
            with results.open("a") as file:
                file.write(json.dumps(found[one.name]) + "\n")
            print(line(found[one.name], RELATIVE), flush=True)
    equal = [name for name, row in found.items() if is_equal(row, RELATIVE)]
    print(f"{len(equal)} of {len(ARCHITECTURES)} architectures train equally in ONNX Runtime (within {RELATIVE:g})")


def read(results: Path) -> dict[str, dict[str, Any]]:
    """The last line of each architecture."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def is_equal(row: dict[str, Any], bound: float) -> bool:
    """Whether the steps could be written and are the module's."""
    return "loss" in row and max(row["loss"], row["update"]) <= bound


def line(row: dict[str, Any], bound: float) -> str:
    """For the screen."""
    if "loss" not in row:
        return f"{row['name']:28} {row['seconds']:5.0f} s  {row['why']}"
    verdict = "" if is_equal(row, bound) else "  DIFFERS"
    return f"{row['name']:28} {row['seconds']:5.0f} s  loss {row['loss']:.1e}  update {row['update']:.1e}{verdict}"


def _row(architecture: Any) -> dict[str, Any]:
    from tests.device.architecture_steps import compare_steps

    logging.disable(logging.ERROR)
    started = time.process_time()
    row: dict[str, Any] = {"name": architecture.name}
    with tempfile.TemporaryDirectory() as folder:
        try:
            difference = compare_steps(architecture, Path(folder))
            row |= {"loss": difference.loss, "update": difference.update, "tensors": difference.tensors}
        except Exception as error:
            *_, first = chain_of(error, only_causes=True)
            row |= {"why": " ".join(f"{type(error).__name__}: {error}".split())[:400], "cause": str(first)[:300]}
    return row | {"seconds": round(time.process_time() - started, 1)}
