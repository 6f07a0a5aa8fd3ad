"""The roofline of a network as text: a table of operator kinds, and what utilization it leaves."""

from __future__ import annotations

from onward.plan.search.hardware import Device
from onward.plan.search.roofline import Roofline
from onward.tables import aligned, bytes_text, section

_SHOWN = 16


def render_roofline(found: Roofline, device: Device, samples: int, precision: str, notes: list[str]) -> str:
    """The text of `onward plan --roofline`.

    Args:
        found: what was counted.
        device: on which.
        samples: of the micro-batch.
        precision: of its matmuls.
        notes: what to know about the counts, a sentence each.
    """
    head = ("operators", "number", "GFLOP", "moved", "FLOP/byte", "device ms", "of the time", "host ms", "limited by")
    shown, rest = found.kinds[:_SHOWN], found.kinds[_SHOWN:]
    rows: list[tuple[str, ...]] = [
        (
            one.name, str(one.count), f"{one.operations / 1e9:,.1f}", bytes_text(one.moved_bytes),
            f"{one.intensity:,.0f}", f"{1e3 * one.seconds:,.3f}", f"{one.seconds / found.seconds:.1%}",
            f"{1e3 * one.launch_seconds:,.3f}", one.limit,
        )
        for one in shown
    ]  # fmt: skip
    if rest:
        seconds = sum(one.seconds for one in rest)
        rows.append(
            (
                f"{len(rest)} other kinds", str(sum(one.count for one in rest)),
                f"{sum(one.operations for one in rest) / 1e9:,.1f}", bytes_text(sum(one.moved_bytes for one in rest)),
                "", f"{1e3 * seconds:,.3f}", f"{seconds / found.seconds:.1%}",
                f"{1e3 * sum(one.launch_seconds for one in rest):,.3f}", "",
            )
        )  # fmt: skip
    moved = bytes_text(found.update_seconds * device.bytes_per_second)
    share = f"{found.update_seconds / found.seconds:.1%}"
    rows.append(("optimizer", "", "", moved, "", f"{1e3 * found.update_seconds:,.3f}", share, "", "memory"))
    of_peak = "" if device.peak_operations_per_second else " (of the measured matmul rate)"
    facts = [
        ("device", f"{device.name}: {found.rate / 1e12:,.4g} TFLOP/s in {precision} and "
                   f"{bytes_text(device.bytes_per_second)}/s attainable"),
        ("micro-batch", f"{samples} samples, {found.operations / 1e12:,.4g} TFLOP forward and backward"),
        ("balance", f"{found.balance:,.0f} FLOP/byte: matmuls limit above it, memory below"),
        ("ceiling", f"{found.utilization(found.seconds):.1%} MFU{of_peak}, {1e3 * found.seconds:,.3f} ms, where "
                    "starting operators costs nothing (compiled, CUDA graphs)"),
        ("operator by operator", f"{found.utilization(found.launched_seconds):.1%} MFU{of_peak}, "
                                 f"{1e3 * found.launched_seconds:,.3f} ms, with {1e6 * device.operator_seconds:.3g} µs "
                                 "of the host for each kernel"),
    ]  # fmt: skip
    parts = [
        "\n".join(["Roofline", *(f"  {line}" for line in aligned(facts))]),
        section("What limits", aligned(rows, right=range(1, 8), head=head)),
        section("Notes", [f"- {note}" for note in notes]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
