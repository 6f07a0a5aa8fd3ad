"""Rows of found files as a line for the terminal, as a table, and as the page benchmarks/gallery.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
PHASES = ("inspect", "runs", "loads", "outputs", "trains", "exports", "init")
_GROUPS = (
    (
        "package",
        "Files from packages",
        "From releases on PyPI and npm, trained by their authors.",
    ),
    ("conversion", "Conversions", "Models of other libraries, written as ONNX by their own converters."),
    (
        "variant",
        "Variants",
        "Files of the first table, processed by another tool: simplified, quantized, optimized, converted.",
    ),
)
_INTRO = """# Gallery: ONNX files from other people's packages

`python -m benchmarks.found_models` collects {count} ONNX files from {packages} releases of packages and from the
converters of other libraries, and runs the same checks on each of them. This page is generated from the results
(`benchmarks/results/found_models.json`); [which-models-train.md](../docs/howto/which-models-train.md) explains them.

- **inspect**: seconds that `onward inspect` takes.
- **outputs**: the largest difference from ONNX Runtime, relative to the output's largest magnitude (at least 1);
  up to 1e-4 passes. Files that round to 8 or 16 bits while they compute are compared node by node.
- **30 updates**: a loss on one fixed batch before and after 30 updates of Adam, in Python.
- **export**: the exported file in ONNX Runtime against the trained network, compared as for outputs.
- **init and train**: the loss over a small training set before and after `onward init` and 30 updates of `onward
  train`, and the seconds from the start of `onward init` to the first step.

{summary}
"""


def summary(row: Row) -> str:
    """One line for the terminal: verdicts, and what failed."""
    phases = row["phases"]
    marks = " ".join(f"{name}={_verdict(phases.get(name))}" for name in PHASES)
    failed = [f"    {name}: {one['shown']}: {one['remark']}" for name, one in phases.items() if one["ok"] is False]
    return "\n".join([f"{row['file']}: {marks} {row.get('ended', '')}", *failed])


def _verdict(phase: Mapping[str, Any] | None) -> str:
    return "-" if phase is None or phase["ok"] is None else ("ok" if phase["ok"] else "NO")


def gallery(rows: Sequence[Row]) -> str:
    """The page."""
    packages = {row["origin"]["name"] for row in rows if row["origin"]["kind"] == "package"}
    text = _INTRO.format(count=len(rows), packages=len(packages), summary=counts(rows))
    for kind, title, about in _GROUPS:
        group = [row for row in rows if row["origin"]["kind"] == kind]
        if group:
            text += f"\n## {title}\n\n{about}\n\n{table(group)}"
    licenses = sorted({(row["origin"]["name"], row["origin"]["license"]) for row in rows if row["origin"]["license"]})
    listed = ", ".join(f"{name} ({license_name})" for name, license_name in licenses)
    return f"{text}\nLicenses, as the packages state them: {listed}.\n"


def counts(rows: Sequence[Row]) -> str:
    """How many files pass each phase, of those to which it applies."""
    lines = []
    named = {"inspect": "inspected", "outputs": "outputs equal", "trains": "loss lower after 30 updates"}
    named |= {"exports": "exported file equal", "init": "loss lower after `onward init` and `onward train`"}
    for name, text in named.items():
        reached = [row["phases"][name] for row in rows if row["phases"].get(name, {"ok": None})["ok"] is not None]
        lines.append(f"{sum(one['ok'] for one in reached)} of {len(reached)} {text}")
    return f"Of {len(rows)} files: {'; '.join(lines)}. Phases that do not apply to a file are not counted."


def table(rows: Iterable[Row]) -> str:
    """The table in Markdown, with remarks below it."""
    lines = [
        "| file | from | trainable | inspect | outputs | 30 updates | export | init and train | first step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    remarks: list[str] = []
    for row in rows:
        phases, (folder, _, name) = row["phases"], row["file"].partition("/")
        inspect, init = phases.get("inspect", {}), phases.get("init", {})
        first = init.get("first_step_seconds")
        cells = [
            name.removesuffix(".onnx"),
            _origin(row["origin"]) or folder,
            _cell("loads", phases.get("loads"), remarks),
            f"{inspect['seconds']:.1f} s" if inspect.get("ok") else "**fails**",
            _cell("outputs", phases.get("outputs") or _unrun(phases.get("runs")), remarks),
            *(_cell(phase, phases.get(phase), remarks) for phase in ("trains", "exports", "init")),
            "-" if first is None else f"{first:.0f} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    below = "\n".join(f"{number}. {text}" for number, text in enumerate(remarks, 1))
    return "\n".join(lines) + "\n" + (f"\n{below}\n" if below else "")


def _origin(origin: Mapping[str, str]) -> str:
    return f"{origin['name']} {origin['version']}".strip()


def _unrun(runs: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A file that ONNX Runtime does not run has nothing to be compared with."""
    return {**runs, "ok": None, "shown": "ORT fails"} if runs is not None and runs["ok"] is False else None


def _cell(phase: str, found: Mapping[str, Any] | None, remarks: list[str]) -> str:
    """What came of a phase; a failure, and what needs a word, has the number of its remark."""
    if found is None:
        return "-"
    text = found["shown"].replace("|", "\\|")
    if found["ok"] is False:
        text = f"**{text}**"
    if not found["remark"] or (found["ok"] and phase in ("loads", "trains", "init")):
        return text
    remark = " ".join(found["remark"].replace("|", "\\|").replace("<", "\\<").split())[:300]
    if remark not in remarks:
        remarks.append(remark)
    return f"{text} ({remarks.index(remark) + 1})"
