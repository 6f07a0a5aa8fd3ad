"""The page of `benchmarks.held_out_layouts`: a table of layouts, reasons of refusals, and collectives of a layer."""

from __future__ import annotations

import re
from typing import Any


def page(known: dict[str, Any], layouts: list[str]) -> str:
    """The tables in Markdown, from what the sweep keeps."""
    reasons: dict[str, str] = {}
    rows = []
    for name, runs in known["runs"].items():
        cells = [_cell(runs.get(layout, "not run"), reasons) for layout in layouts]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    found = [runs.get(layout, "not run") for runs in known["runs"].values() for layout in layouts]
    kinds = [re.sub("^(equal|DIFFERENT) .*", r"\1", one.partition(":")[0]) for one in found]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(sorted(kinds)))
    head = f"| model | {' | '.join(layouts)} |\n|{'---|' * (len(layouts) + 1)}\n"
    notes = "\n".join(f"- {mark}: {reason}" for reason, mark in reasons.items())
    collectives = "\n".join(
        f"| {name} | {forward} | {backward} | {rows or ''} | {megatron or ''} |"
        for name, (forward, backward, rows, megatron) in known["collectives"].items()
    )
    return f"""# Held-out models in many layouts

Written by `python -m benchmarks.held_out_layouts --page`. Each model trains three updates of two micro-batches with
AdamW, in each layout and on one process, with Gloo on CPU. A number is the largest difference of a weight from one
process, relative to the weight's largest element; up to 1e-4 counts as equal. Layouts: h: tensor parallel,
p: pipeline, context and expert parallel by that many ranks, and 2x2x2: data, tensor and pipeline parallel with ZeRO.
{len(known["runs"])} models: {counts}.

{head}{chr(10).join(rows)}

Refusals and failures:

{notes}

## Collectives of a layer

All-reduces forward and backward that tensor parallelism adds for one more layer, sums of rows that norms over ranks
need in addition (one number for each token), and the all-reduces of the same layer in Megatron-LM, both directions
together. Expert parallelism adds to each mixture 2 all-to-alls forward and 2 backward, as Megatron-LM's dropless mode
does, and one of the tokens' counts forward (`tests/invariants/test_expert_routing.py`).

| model | forward | backward | of rows | Megatron-LM, both |
|---|---|---|---|---|
{collectives}
"""


def _cell(found: str, reasons: dict[str, str]) -> str:
    kind, _, reason = found.partition(": ")
    if kind in ("refused", "HANGS", "FAILS", "left out"):
        return f"{kind} {reasons.setdefault(reason, f'({len(reasons) + 1})')}"
    return found.removeprefix("equal ") if found.startswith("equal") else found
