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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onward.errors import chain_of

RESULTS = Path("build") / "step_coverage.jsonl"
PAGE = Path(__file__).with_name("step_coverage.md")


def compare_all_steps(match: str, again: bool, results: Path = RESULTS) -> None:
    """Compares the steps of every architecture that no line is there of, and prints the table."""
    from tests.lowering.architectures import ARCHITECTURES

    results.parent.mkdir(parents=True, exist_ok=True)
    found = read(results)
    for one in ARCHITECTURES:
        if match in one.name and (again or one.name not in found):
            found[one.name] = _row(one)
            with results.open("a") as file:
                file.write(json.dumps(found[one.name]) + "\n")
            print(line(found[one.name]), flush=True)
    equal = [name for name, row in found.items() if row.get("equal")]
    print(f"{len(equal)} of {len(ARCHITECTURES)} architectures train equally in ONNX Runtime")
    PAGE.write_text(page(found, [one.name for one in ARCHITECTURES]))


def read(results: Path) -> dict[str, dict[str, Any]]:
    """The last line of each architecture."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def line(row: dict[str, Any]) -> str:
    """For the screen."""
    return f"{row['name']:28} {row['seconds']:5.0f} s  {_outcome(row)}"


def page(found: dict[str, dict[str, Any]], names: Sequence[str]) -> str:
    """The page of results: what is equal, and the reason of everything that is not."""
    equal = [name for name in names if found.get(name, {}).get("equal")]
    others = [name for name in names if name in found and name not in equal]
    missing = [name for name in names if name not in found]
    lines = [
        "# Architectures that train on a device",
        "",
        "`python -m benchmarks.coverage --steps` writes the device bundle of every architecture of the tests "
        "(`tests/lowering/architectures.py`), trains two steps with it in stock ONNX Runtime, the second with another "
        "batch size where the export leaves it open, and compares them with the torch module's: the loss of both, and "
        "every weight, its gradient and every running statistic after the first, within 1e-4. Where they differ more, "
        "both are compared with torch in float64, over 11 batches whose values are nudged by a rounding: a device is "
        "equal where its median distance is at most 1.5 times that of torch in float32 (`tests/device/rounding.py`).",
        "",
        f"Compared: {len(equal) + len(others)} of {len(names)}; equal: {len(equal)}.",
        "",
        "| architecture | tensors | CPU seconds | loss | weights | gradients |",
        "|---|---|---|---|---|---|",
    ]
    for name in equal:
        row = found[name]
        note = f" ({_beyond(row)})" if row.get("beyond") else ""
        lines.append(
            f"| {name} | {row['tensors']} | {row['seconds']:.0f} | {row['loss']:.1e} | {row['update']:.1e}{note} | "
            + (f"{row['gradient']:.1e} |" if "gradient" in row else "not compared |")
        )
    lines += ["", "Weights: 0 is a difference of no more than what float32 rounds off the weight.", ""]
    if others:
        lines += ["| not written, or not equal | why |", "|---|---|"]
        lines += [f"| {name} | {_outcome(found[name]).replace('|', ' ')} |" for name in others]
    if missing:
        lines += ["", f"Not compared yet: {', '.join(missing)}."]
    return "\n".join(lines).rstrip() + "\n"


def _outcome(row: dict[str, Any]) -> str:
    if "loss" not in row:
        return str(row["why"])
    found = f"loss {row['loss']:.1e}  update {row['update']:.1e}"
    if row["equal"]:
        return f"{found}  ({_beyond(row)})" if row.get("beyond") else found
    return f"{found}  DIFFERS ({_beyond(row)})"


def _beyond(row: dict[str, Any]) -> str:
    found = row["beyond"]
    return (
        f"from float64: device {found['device']:.1e}, torch {found['torch']:.1e}; "
        f"losses {found['device_loss']:.1e}, {found['torch_loss']:.1e}"
    )


def _row(architecture: Any) -> dict[str, Any]:
    from tests.device.architecture_steps import compare_steps

    logging.disable(logging.ERROR)
    started = time.process_time()
    row: dict[str, Any] = {"name": architecture.name}
    with tempfile.TemporaryDirectory() as folder:
        try:
            difference = compare_steps(architecture, Path(folder))
            row |= asdict(difference) | {"equal": difference.is_equal}
        except Exception as error:
            *_, first = chain_of(error, only_causes=True)
            row |= {"why": " ".join(f"{type(error).__name__}: {error}".split())[:400], "cause": str(first)[:300]}
    return row | {"seconds": round(time.process_time() - started, 1)}
