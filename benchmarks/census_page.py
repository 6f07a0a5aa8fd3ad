"""The page of `benchmarks.census`: medians, counts below 1.0, the worst ten with reasons, and all rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
WHY: dict[str, str] = {
    "electra": "matmuls and attention take 0.7 of the time, on both sides",
    "gru": "torch's own layer, on both sides",
    "bidirectional_gru": "torch's own layer, on both sides",
    "dueling": "convolutions take 0.8 of the time, torch's on both sides",
    "spatial_transformer": "convolutions and the sampling of the grid take 0.7 of the time, torch's on both sides",
    "locally_connected": "cutting images into windows, summing them up, and copies for matmuls take 0.7 of the time",
    "vit": "matmuls and attention take 0.6 of the time, on both sides",
    "deit": "as vit",
    "distilbert": "matmuls and attention take half of the time, on both sides",
    "mpt": "matmuls take half of the time, on both sides",
    "state_space": "the convolution and its gradient, 0.8 of the time, are torch's on both sides",
}
"""Architecture -> what its time goes to where onward is slow, from the profiles of `--profiles`."""
AGREEMENT = 1e-4
"""The most that a loss may differ, relative to the eager loop's."""
FIRST_AGREEMENT = {"hgnet_v2": 2e-4}
"""The same for the first loss where torch's own loop differs by as much between channels first and last."""
PARTING = {
    "mobilenet_v1": "batch statistics over two images: three updates agree to 2e-6, then rounding grows",
    "mobilenet_v2": "batch statistics over two images, down to planes of one pixel, so that rounding grows with "
    "updates: at the fourth, torch's own loop gives 1.507 in float32, 1.665 with channels-last and 1.424 in float64",
    "resnet": "batch statistics over eight images: rounding grows; onward's loss is nearer to float64 than eager's",
    "hgnet_v2": "batch statistics over eight numbers: with the channels last torch's own loop has first losses from "
    "1.48790 to 1.48819 when inputs are rounded once more (eager 1.48788 to 1.48800, in float64 1.48793)",
    "patchtst": "the module keeps its table of positions, which the ONNX file does not record; onward trains it",
}
"""Architecture -> why its losses differ by more. Another one that does has wrong numbers until it is explained."""


def speed(row: Row, other: str, clock: str = "cpu", own: str = "onward") -> float | None:
    """onward's throughput relative to another way's, the median over the starts; None: one of them was not measured."""
    found = speeds(row, other, clock, own)
    return statistics.median(found) if found else None


def speeds(row: Row, other: str, clock: str = "cpu", own: str = "onward") -> list[float]:
    """The same of each start, the median over its rounds; empty: one of them was not measured."""
    ways = row["ways"]
    if any("tensor_bytes" not in ways.get(way, {}) or "failure" in ways[way] for way in (own, other)):
        return []
    starts = zip(ways[other][clock], ways[own][clock], strict=True)
    return [statistics.median(x / y for x, y in zip(theirs, mine, strict=True)) for theirs, mine in starts]


def seconds_of_update(row: Row, way: str) -> float:
    """CPU time, the median over the starts."""
    return statistics.median(statistics.median(rounds) for rounds in row["ways"][way]["cpu"])


def memory(row: Row, other: str) -> float | None:
    """onward's peak of tensors relative to another way's."""
    if speed(row, other) is None:
        return None
    ways = row["ways"]
    return float(ways["onward"]["tensor_bytes"] / ways[other]["tensor_bytes"])


def difference(row: Row) -> float:
    """The largest difference of a loss from the eager loop's at the same update, relative to it."""
    ways = row["ways"]
    pairs = zip(ways["onward"]["losses"], ways["eager"]["losses"], strict=False)
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def parting(rows: Sequence[Row]) -> list[str]:
    """A line for each architecture whose losses differ from the eager loop's, with the reason."""
    return [
        f"- `{row['name']}`: {PARTING.get(row['name'], '**not explained**')}"
        for row in rows
        if speed(row, "eager") is not None and difference(row) > AGREEMENT
    ]


def unrepeated(rows: Sequence[Row]) -> list[str]:
    """Architecture and way for each whose starts did not give the same losses, bit for bit."""
    return [
        f"{row['name']}, {way}"
        for row in rows
        for way, found in row["ways"].items()
        if way.startswith("onward") and not found.get("is_repeated", True)
    ]


def refused(rows: Sequence[Row]) -> list[str]:
    """The architectures of which torch could not compile a segment."""
    return [row["name"] for row in rows if any(way.get("refusals") for way in row["ways"].values())]


def counts(rows: Sequence[Row], other: str, goal: float) -> str:
    """A sentence: the median speed, how many are below 1.0, and memory."""
    found = sorted(value for row in rows if (value := speed(row, other)) is not None)
    if not found:
        return f"against {other}: not measured"
    sizes = [value for row in rows if (value := memory(row, other)) is not None]
    below = sum(value < 1.0 for value in found)
    reached = sum(value >= goal for value in found)
    return (
        f"against {other}, {len(found)} networks: median throughput {statistics.median(found):.2f} (from "
        f"{found[0]:.2f} to {found[-1]:.2f}), {below} below 1.0, {reached} at or above {goal}; memory of tensors "
        f"{statistics.median(sizes):.2f} in the median, at most {max(sizes):.2f}, "
        f"{sum(value > 1.0 for value in sizes)} above 1.0"
    )


def compilation(rows: Sequence[Row]) -> str:
    """A sentence: what `speed.compile: auto` compiled, and what that takes."""
    compiled = [row["ways"]["onward"] for row in rows if row["ways"]["onward"].get("is_compiled")]
    if not compiled:
        return "`speed.compile: auto` compiled none"
    firsts = [float(way["first_seconds"]) for way in compiled]
    return (
        f"`speed.compile: auto` compiled {len(compiled)} of them, marked (runs are taken to be long); their first "
        f"update took {statistics.median(firsts):.0f} s in the median, at most {max(firsts):.0f} s; networks with a "
        f"segment that torch could not compile: {', '.join(refused(rows)) or 'none'}"
    )


def page(rows: Mapping[str, Row], held_out: Mapping[str, Row], left_out: Mapping[str, str]) -> str:
    """All of it in Markdown."""
    every = list(rows.values())
    others = list(held_out.values())
    measured = [row for row in every if speed(row, "eager") is not None]
    slowest = sorted(measured, key=lambda row: speed(row, "eager") or 0.0)[:10]
    worst = [
        f"| {row['name']} | {_number(speed(row, 'eager'))} | {WHY.get(row['name'], 'not known')} |" for row in slowest
    ]
    failures = [
        f"- {row['name']}, {way}: {found['failure']}"
        for row in (*every, *others)
        for way, found in row["ways"].items()
        if "failure" in found
    ]
    failures += [f"- {name}: left out, {reason}" for name, reason in left_out.items()]
    machines = "; ".join(sorted({str(row["machine"]) for row in every}))
    loads = [float(row["load"]) for row in every]
    return f"""# Census: onward on every architecture of the coverage table

Written by `python -m benchmarks.census --page`. {machines}. Each network is trained by onward with its defaults, from
its ONNX export, and by the same torch module in a loop by hand, eager and under `torch.compile`: same loss, batches,
gradient clipping and fused AdamW, fp32, one thread, {len(measured)} networks. Ratios are onward's relative to the
other's, in alternate turns on one core; above 1 onward is faster, memory below 1 is smaller. Each way is started
several times: the ratio is the median over the starts, whose lowest and highest ratio is in the column *starts*. **The
ratio by CPU time is the one to trust**: other processes wanted the cores (load {min(loads):.0f} to {max(loads):.0f}),
and the ratio by the clock contains them.
{WIDTHS}

Losses of the last column are compared over all updates of a row. Those that differ by more than {AGREEMENT:.0e}:

{chr(10).join(parting([*every, *others]))}

Starts whose losses are not bitwise equal to those of the first: {"; ".join(unrepeated([*every, *others])) or "none"}.

- {compilation(every)}
- {counts(every, "eager", 1.25)}
- {counts(every, "compiled", 1.0)}

## The slowest ten

| network | throughput | why |
|---|---|---|
{chr(10).join(worst)}

## All

| {" | ".join(COLUMNS)} |
|{"---|" * len(COLUMNS)}
{chr(10).join(_row(row) for row in measured)}

## Held out

Networks that no kernel of onward was chosen by (`benchmarks/census_held_out.py`), measured in the same way; next to
what `speed.compile: auto` makes of them, their throughput with `false` and `true`. `bit` and `patchtsmixer` were such
until their slow operators were fixed, and all confirmed the estimated gain from which on `auto` compiles.

- {compilation(others)}
- {counts(others, "eager", 1.25)}

| {" | ".join(HELD_OUT_COLUMNS)} |
|{"---|" * len(HELD_OUT_COLUMNS)}
{chr(10).join(_held_out_row(row) for row in others if speed(row, "eager") is not None)}

Not measured:

{chr(10).join(failures)}
"""


COLUMNS = (
    "network", "parameters", "nodes", "batch", "eager update", "onward", "compiled", "throughput", "starts",
    "by the clock", "memory", "against compiled: throughput", "against compiled: memory", "loss differs by",
)  # fmt: skip
HELD_OUT_COLUMNS = (
    "network", "parameters", "nodes", "batch", "eager update", "onward", "compiled", "throughput", "starts",
    "throughput uncompiled", "throughput compiled", "memory", "loss differs by",
)  # fmt: skip
WIDTHS = (
    "Networks of `transformers` are eight times as wide as in the tests, their sequences nine times as long; of the\n"
    "others only the batch grows, so their layers are 4 to 24 wide and their updates mostly element-wise."
)


def _row(row: Row) -> str:
    return _line([
        *_size_and_time(row),
        *_speed_and_starts(row),
        _number(speed(row, "eager", "wall")),
        _number(memory(row, "eager"), is_memory=True),
        _number(speed(row, "compiled")),
        _number(memory(row, "compiled"), is_memory=True),
        _agreement(row),
    ])  # fmt: skip


def _held_out_row(row: Row) -> str:
    return _line([
        *_size_and_time(row),
        *_speed_and_starts(row),
        _number(speed(row, "eager", own="onward uncompiled")),
        _number(speed(row, "eager", own="onward compiled")),
        _number(memory(row, "eager"), is_memory=True),
        _agreement(row),
    ])  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _size_and_time(row: Row) -> list[str]:
    own, eager = (seconds_of_update(row, way) * 1e3 for way in ("onward", "eager"))
    return [
        row["name"],
        f"{row['weights'] / 1e6:.3f} M",
        str(row["nodes"]),
        str(row["batch"]),
        f"{eager:.1f} ms",
        f"{own:.1f} ms",
        "yes" if row["ways"]["onward"].get("is_compiled") else "",
    ]


def _speed_and_starts(row: Row) -> list[str]:
    found = speeds(row, "eager")
    return [_number(speed(row, "eager")), f"{min(found):.2f} to {max(found):.2f}" if len(found) > 1 else ""]


def _agreement(row: Row) -> str:
    differs_by = difference(row)
    return f"{differs_by:.0e}" if differs_by <= AGREEMENT else f"**{differs_by:.0e}**"


def _number(value: float | None, is_memory: bool = False) -> str:
    """Bold where onward is slower, or needs more memory."""
    if value is None:
        return ""
    is_worse = value > 1.0 if is_memory else value < 1.0
    return f"**{value:.2f}**" if is_worse else f"{value:.2f}"
