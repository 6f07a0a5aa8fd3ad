"""From the events of torch's profiler to the time of every ONNX node, as values, as a printed table and as CSV."""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from onward.lowering.program import NodeLabel
from onward.report.formatting import format_bytes, shorten_middle

FORWARD = "onward::forward"
"""The range of an entire forward pass in the trace."""

STEP = "ProfilerStep#"
"""What the range of an entire step is called in the trace, its number following."""

PREPARATION = "onward::profiler_preparation"
"""What the range is called in which a program gets the twin that marks its nodes: time of the profiler, of no step."""

_BACKWARD = "autograd::engine::evaluate_function: "

OUTSIDE = NodeLabel("(outside nodes)", "")
"""Row of the work between nodes: loss scaling, casts, the interpreter of the program."""

ACCUMULATION = NodeLabel("(gradient accumulation)", "")
"""Row of autograd's adding of gradients to weights."""


TABLE_COLUMNS = (
    "name",
    "operator",
    "calls",
    "forward_seconds",
    "backward_seconds",
    "share",
    "forward_host_seconds",
    "backward_host_seconds",
    "result_bytes",
)
"""Of the CSV file."""


class NodeCall(NamedTuple):
    """What one forward call of an ONNX node left behind.

    Attributes:
        text: of its range in the trace.
        first, end: it created the autograd nodes with sequence numbers from `first` up to, not including, `end`.
    """

    text: str
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class NodeTime:
    """What one ONNX node took, summed over the profiled steps.

    Attributes:
        name, op_type: of the node; a name in parentheses is work between nodes.
        calls: forward calls, those in recomputation not counted.
        forward_seconds, backward_seconds: on the device that computed: a GPU's kernels, or else the CPU's wall clock.
            Recomputation of a forward pass counts as backward. What a nested graph's nodes took is theirs alone.
        forward_host_seconds, backward_host_seconds: the CPU's wall clock, launching kernels included.
        result_bytes: memory that the results of its first call take; 0 for views, without what autograd saves in
            addition.
    """

    name: str
    op_type: str
    calls: int
    forward_seconds: float
    backward_seconds: float
    forward_host_seconds: float
    backward_host_seconds: float
    result_bytes: int

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, kw_only=True)
class Times:
    """All times of a profile; those of nodes and passes are summed over its steps.

    Attributes:
        device: "cpu", or "cuda" where kernels were recorded; what `seconds` of nodes and passes refer to.
        step_seconds: wall clock of a step, the mean as every figure here: steps that only pass a micro-batch to a
            pipeline, steps that update the weights, waiting for data and for other ranks included.
        forward_seconds, backward_seconds: entire passes, the work between nodes included.
        nodes: longest first; they sum to both passes.
    """

    device: str
    step_seconds: float
    forward_seconds: float
    backward_seconds: float
    nodes: tuple[NodeTime, ...]


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """What was profiled, and where it is stored.

    Attributes:
        first_step, last_step: of the round, both included; they make entire weight updates where any is complete.
        times: of steps, passes and nodes.
        trace_path: opens in Perfetto and in TensorBoard's profile page.
        table_path: all nodes as CSV.
    """

    first_step: int
    last_step: int
    times: Times
    trace_path: Path
    table_path: Path
    gradient_accumulation_steps: int = 1

    def table(self, top: int = 20) -> str:
        """A printed table of the nodes that take most, in milliseconds a step, under a line about all nodes."""
        return _format_table(self, top)


@dataclass(kw_only=True)
class _Sum:
    """The times of one label while they are summed, in microseconds."""

    calls: int = 0
    forward: float = 0.0
    backward: float = 0.0
    forward_host: float = 0.0
    backward_host: float = 0.0


def attribute_times(
    events: Iterable[Any],
    labels: Mapping[str, NodeLabel],
    calls: Sequence[NodeCall],
    result_bytes: Mapping[str, int],
    step_count: int | None = None,
) -> Times:
    """Gives every microsecond of the steps' forward and backward passes to an ONNX node, or to a row between nodes.

    What runs between two steps (evaluation, callbacks) is not counted.

    Args:
        events: `FunctionEvent`s of a stopped profile.
        labels: name of a range in the trace -> the node it marks.
        calls: what every call of a node left behind; a nested graph's nodes before the node that holds them.
        result_bytes: name of a range -> memory that the results of its node take.
        step_count: how many of the recorded steps count, from the first on; None: all.
    """
    on_host = [event for event in events if event.device_type.name == "CPU"]
    # torch calls every step "ProfilerStep*" here, for its own tables, and by its number in the trace.
    ranges = [event.time_range for event in on_host if event.name.startswith(STEP.removesuffix("#"))]
    steps = sorted((one.start, one.end) for one in ranges)[:step_count]
    on_host = [event for event in on_host if _is_within(event, steps)]
    on_device = any(event.kernels for event in on_host)
    owners: dict[int, NodeLabel] = {}
    for call in calls:
        for number in range(call.first, call.end):
            owners.setdefault(number, labels[call.text])
    owned = {id(event): label for event in on_host if (label := _label_of(event, labels, owners)) is not None}
    sums: dict[NodeLabel, _Sum] = {}
    passes = {False: 0.0, True: 0.0}
    for event in on_host:
        label = owned.get(id(event))
        if label is None:
            continue
        outer = _outer(event, owned)
        is_backward = _is_backward(event, owned)
        host = event.time_range.elapsed_us()
        device = event.device_time_total if on_device else host
        _add(sums, label, is_backward, host, device)
        if event.name in labels and not is_backward:
            sums[label].calls += 1
        if outer is None:
            passes[is_backward] += device
        else:
            # Its own time is its own alone.
            _add(sums, owned[id(outer)], _is_backward(outer, owned), -host, -device)
    sizes = {labels[text]: size for text, size in result_bytes.items()}
    rows = [_row(label, total, sizes.get(label, 0)) for label, total in sums.items()]
    preparation = sum(event.time_range.elapsed_us() for event in on_host if event.name == PREPARATION)
    in_steps = sum(end - start for start, end in steps) - preparation
    return Times(
        device="cuda" if on_device else "cpu",
        step_seconds=in_steps * 1e-6 / len(steps) if steps else 0.0,
        forward_seconds=passes[False] * 1e-6,
        backward_seconds=passes[True] * 1e-6,
        nodes=tuple(sorted(rows, key=lambda row: row.seconds, reverse=True)),
    )


def _is_within(event: Any, steps: Sequence[tuple[float, float]]) -> bool:
    """Whether an event began during one of the steps, which are in order; on any thread, so by the clock."""
    began = event.time_range.start
    index = bisect_right(steps, (began, float("inf"))) - 1
    return index >= 0 and began <= steps[index][1]


def _label_of(event: Any, labels: Mapping[str, NodeLabel], owners: Mapping[int, NodeLabel]) -> NodeLabel | None:
    """Whose the time of an event is; None where that follows from the events around it."""
    if event.name == FORWARD:
        return OUTSIDE
    if event.name in labels:
        return labels[event.name]
    if not event.name.startswith(_BACKWARD):
        return None
    if event.name.endswith("AccumulateGrad"):
        return ACCUMULATION
    return owners.get(event.sequence_nr, OUTSIDE)


def _outer(event: Any, owned: Mapping[int, NodeLabel]) -> Any:
    """The closest event around this one that has a label."""
    outer = event.cpu_parent
    while outer is not None and id(outer) not in owned:
        outer = outer.cpu_parent
    return outer


def _is_backward(event: Any, owned: Mapping[int, NodeLabel]) -> bool:
    """Whether an event, or one around it, is autograd's: a forward pass inside is recomputation."""
    while event is not None:
        if event.name.startswith(_BACKWARD):
            return True
        event = _outer(event, owned)
    return False


def _add(sums: dict[NodeLabel, _Sum], label: NodeLabel, is_backward: bool, host: float, device: float) -> None:
    total = sums.setdefault(label, _Sum())
    if is_backward:
        total.backward += device
        total.backward_host += host
    else:
        total.forward += device
        total.forward_host += host


def _row(label: NodeLabel, total: _Sum, result_bytes: int) -> NodeTime:
    return NodeTime(
        name=label.name,
        op_type=label.op_type,
        calls=total.calls,
        forward_seconds=total.forward * 1e-6,
        backward_seconds=total.backward * 1e-6,
        forward_host_seconds=total.forward_host * 1e-6,
        backward_host_seconds=total.backward_host * 1e-6,
        result_bytes=result_bytes,
    )


def write_table(report: ProfileReport) -> None:
    """Writes every row of a profile as CSV, sums over its steps, longest first.

    Raises:
        OSError: the file cannot be written.
    """
    total = report.times.forward_seconds + report.times.backward_seconds
    with open(report.table_path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(TABLE_COLUMNS)
        for row in report.times.nodes:
            seconds = (row.forward_seconds, row.backward_seconds)
            host_seconds = (row.forward_host_seconds, row.backward_host_seconds)
            writer.writerow(
                [row.name, row.op_type, row.calls]
                + [f"{value:.7f}" for value in seconds]
                + [f"{row.seconds / total if total else 0.0:.6f}"]
                + [f"{value:.7f}" for value in host_seconds]
                + [row.result_bytes]
            )


def _format_table(report: ProfileReport, top: int) -> str:
    times, steps = report.times, report.last_step - report.first_step + 1
    which = f"step {report.first_step}" if steps == 1 else f"steps {report.first_step} to {report.last_step}"
    of_update = report.gradient_accumulation_steps
    update = f", {1e3 * of_update * times.step_seconds:.3f} ms an update of {of_update} steps" if of_update > 1 else ""
    total = times.forward_seconds + times.backward_seconds
    shown, rest = times.nodes[:top], times.nodes[top:]

    def per_step(seconds: float) -> str:
        return f"{1e3 * seconds / steps:.3f}"

    lines = [
        f"profile of {which}: {1e3 * times.step_seconds:.3f} ms a step{update}; on the {times.device} "
        f"{per_step(times.forward_seconds)} ms forward, {per_step(times.backward_seconds)} ms backward",
        "",
        f"{'share':>6}  {'forward ms':>10}  {'backward ms':>11}  {'calls':>6}  {'results':>9}  {'operator':<24}  node",
    ]
    for row in shown:
        lines.append(
            f"{row.seconds / total if total else 0:6.1%}  {per_step(row.forward_seconds):>10}  "
            f"{per_step(row.backward_seconds):>11}  {row.calls / steps:>6g}  "
            f"{format_bytes(row.result_bytes) if row.calls else '':>9}  "
            f"{shorten_middle(row.op_type, 24):<24}  {shorten_middle(row.name, 60)}"
        )
    if rest:
        seconds = sum(row.seconds for row in rest)
        forward = sum(row.forward_seconds for row in rest)
        lines.append(
            f"{seconds / total if total else 0:6.1%}  {per_step(forward):>10}  {per_step(seconds - forward):>11}  "
            f"{'':>6}  {'':>9}  {'':<24}  ({len(rest)} more)"
        )
    lines += [
        "",
        f"by operator: {_by_operator(times, total)}",
        f"trace: {report.trace_path}",
        f"table: {report.table_path}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _by_operator(times: Times, total: float, top: int = 8) -> str:
    """`MatMul 52.1%, Softmax 8.0%, ..., the rest 4.2%`."""
    sums: dict[str, float] = {}
    for row in times.nodes:
        sums[row.op_type or row.name] = sums.get(row.op_type or row.name, 0.0) + row.seconds
    ordered = sorted(sums.items(), key=lambda item: item[1], reverse=True)
    if len(ordered) > top:
        ordered = [*ordered[:top], ("the rest", sum(seconds for _, seconds in ordered[top:]))]
    return ", ".join(f"{name} {seconds / total if total else 0:.1%}" for name, seconds in ordered)
