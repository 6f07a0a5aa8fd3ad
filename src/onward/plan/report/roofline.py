"""The roofline of a network as text: a table of operator kinds, and what utilization it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onward.plan.search.hardware import Device
from onward.plan.search.roofline import OperatorKind, Roofline
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
    head = ("operators", "number", "operations", "moved", "FLOP/byte", "device", "host", "of the time", "limited by")
    counted = {one.name: _counted(one, device) for one in found.kinds}
    total = sum(counted.values()) + found.update_seconds
    kinds = sorted(found.kinds, key=lambda one: -counted[one.name])
    shown, rest = kinds[:_SHOWN], kinds[_SHOWN:]
    rows: list[tuple[str, ...]] = [
        (
            one.name, str(one.count), _flop(one.operations), *_bytes_of(one), _time(one.seconds),
            _time(one.launch_seconds), f"{counted[one.name] / total:.1%}", _limit(one.limit, device),
        )
        for one in shown
    ]  # fmt: skip
    if rest:
        share = sum(counted[one.name] for one in rest) / total
        rows.append(
            (
                f"{len(rest)} other kinds", str(sum(one.count for one in rest)),
                _flop(sum(one.operations for one in rest)), bytes_text(sum(one.moved_bytes for one in rest)),
                "", _time(sum(one.seconds for one in rest)), _time(sum(one.launch_seconds for one in rest)),
                f"{share:.1%}", "",
            )
        )  # fmt: skip
    moved = bytes_text(found.update_seconds * device.bytes_per_second)
    share = found.update_seconds / total
    rows.append(("optimizer", "", "", moved, "", _time(found.update_seconds), "", f"{share:.1%}", "memory"))
    if any(one.operations and not one.moved_bytes for one in found.kinds):
        notes = [*notes, "where nothing is moved, the output is computed in chunks by the loss and never stored."]
    is_gpu = device.is_asynchronous
    uncounted = "starting operators costs nothing" + (" (compiled, CUDA graphs)" if is_gpu else " (compiled)")
    of_peak = "" if device.peak_operations_per_second else " (of the measured matmul rate)"
    facts = [
        ("device", f"{device.name}: {found.rate / 1e12:,.4g} TFLOP/s in {precision} and "
                   f"{bytes_text(device.bytes_per_second)}/s attainable"),
        ("micro-batch", f"{samples} samples, {_flop(found.operations)} forward and backward"),
        ("balance", f"{found.balance:,.0f} FLOP/byte: matmuls limit above it, memory below"),
        ("ceiling", f"{found.utilization(found.seconds):.1%} MFU{of_peak}, {_time(found.seconds)}, where "
                    f"{uncounted}"),
        ("operator by operator", f"{found.utilization(found.launched_seconds):.1%} MFU{of_peak}, "
                                 f"{_time(found.launched_seconds)}, with {_time(device.operator_seconds)} "
                                 f"of the host for each {'kernel' if is_gpu else 'operator, forward or backward'}"),
    ]  # fmt: skip
    parts = [
        "\n".join(["Roofline", *(f"  {line}" for line in aligned(facts))]),
        section("What limits", aligned(rows, right=range(1, 8), head=head)),
        section("What to do", [_advice(found, counted, total, device, precision)]),
        section("Notes", [f"- {note}" for note in notes]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _counted(kind: OperatorKind, device: Device) -> float:
    """Seconds that an operator takes: a GPU computes while the host starts the next one, a CPU does both itself."""
    both = kind.seconds, kind.launch_seconds
    return max(both) if device.is_asynchronous else sum(both)


def _advice(found: Roofline, counted: Mapping[str, float], total: float, device: Device, precision: str) -> str:
    """What shortens what takes most of the time, in a line."""
    shares = dict.fromkeys(("launches", "memory", "matmuls"), 0.0) | {"optimizer": found.update_seconds / total}
    for one in found.kinds:
        shares[one.limit] += counted[one.name] / total
    most = max(shares, key=lambda name: shares[name])
    rates = device.operations_per_second
    low = next((name for name in ("bf16", "fp16") if rates.get(name, 0.0) > rates["fp32"]), None)
    lower = f"set mixed_precision to compute in {low}" if precision == "fp32" and low is not None else ""
    graphs = " or speed.cuda_graphs" if device.is_asynchronous else ""
    fusing = "compiled code, the default on GPUs," if device.is_asynchronous else "set speed.compile, which"
    what, advice = {
        "launches": (_limit("launches", device), f"raise training.batch_size, or set speed.compile{graphs}"),
        "memory": ("moving bytes", f"{f'{lower}, or ' * bool(lower)}{fusing} fuses neighbors"),
        "matmuls": ("matmuls", lower or "several devices (--ranks) or a faster one shorten it"),
        "optimizer": ("the optimizer", "raise training.batch_size or gradient_accumulation_steps: fewer updates"),
    }[most]
    return f"{what}: {shares[most]:.0%} of the time; {advice}."


def _limit(limit: str, device: Device) -> str:
    return "starting operators" if limit == "launches" and not device.is_asynchronous else limit


def _bytes_of(kind: OperatorKind) -> tuple[str, str]:
    """Moved bytes, and operations for each; empty for what is never stored."""
    return (bytes_text(kind.moved_bytes), f"{kind.intensity:,.0f}") if kind.moved_bytes else ("", "")


def _flop(count: float) -> str:
    return _scaled(count, ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP")))


def _time(seconds: float) -> str:
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")))


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """A number in the largest unit of which it has one."""
    if not value:
        return "0"
    size, unit = next(((size, unit) for size, unit in units if value >= size), units[-1])
    return f"{value / size:,.1f} {unit}"
