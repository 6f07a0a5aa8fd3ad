"""What one found file is put through: inspected, computed, trained, exported; each phase is written down when it ends.

`python -m benchmarks.found_models_row MODEL --file NAME --result FILE` is one row; `benchmarks.found_models` starts one
process a row, so that a crash, a hang or a memory limit is a row and not the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 1e-4
"""Of the largest difference of an output, relative to the output's largest magnitude (or 1, where that is less)."""


@dataclass(frozen=True)
class Outcome:
    """What came of a phase.

    Attributes:
        ok: whether it went well; None: it does not apply to the file.
        shown: a few words for a table.
        remark: what a reader should know beyond.
        first_step_seconds: from the start of `onward init` to the first step, where there was one.
    """

    ok: bool | None
    shown: str
    remark: str = ""
    first_step_seconds: float | None = None


Result = dict[str, Any]


class Row:
    """Phases of one file and what came of them, kept on disk after each."""

    def __init__(self, file: str, kept: Path) -> None:
        self.phases: dict[str, Result] = {}
        self._file, self._kept = file, kept

    def holds(self, *names: str) -> bool:
        """Whether these phases went well."""
        return all(self.phases.get(name, {}).get("ok") for name in names)

    def run(self, name: str, phase: Callable[[], Outcome]) -> None:
        """Runs a phase; an exception is an outcome, too."""
        unended = Outcome(False, "did not end", "time or memory limit, or a crash")
        self.phases[name] = asdict(unended)
        self.write()
        start = time.perf_counter()
        try:
            outcome = phase()
        except Exception as error:
            outcome = Outcome(False, "fails", _first_lines(error))
        self.phases[name] = {**asdict(outcome), "seconds": round(time.perf_counter() - start, 2)}
        self.write()

    def write(self) -> None:
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        row = {"file": self._file, "peak_mb": round(peak_mb), "phases": self.phases}
        self._kept.write_text(json.dumps(row, indent=1))


def _first_lines(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) < 600 else text[:600] + " ..."


def run_row(model: Path, file: str, kept: Path) -> dict[str, Result]:
    """All phases of a file, in order; a phase that needs one that failed is left out."""
    from benchmarks.found_models_checks import Checks

    row = Row(file, kept)
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checks = Checks(model, file, Path(scratch))
        row.run("inspect", checks.inspect)
        row.run("runs", checks.run_in_onnxruntime)
        row.run("loads", checks.load)
        if row.holds("runs", "loads"):
            row.run("outputs", checks.compare_outputs)
            row.run("trains", checks.train)
        if row.holds("trains"):
            row.run("exports", checks.compare_export)
        row.run("init", checks.init_and_train)
    return row.phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--file", required=True, help="what the row is called")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--memory-gb", type=float, default=12.0)
    options = parser.parse_args()
    limit_bytes = int(options.memory_gb * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    np.random.seed(0)
    run_row(options.model, options.file, options.result)


if __name__ == "__main__":
    main()
