"""Numbers as people read them: losses, rates, counts and times, each at a width that stays the same as it changes.

Pure functions of one number; both modes of the console and the profiler's table use them.
"""

from __future__ import annotations

import math

_SECONDS_PER_MINUTE = 60
_SECONDS_PER_HOUR = 3_600
_SECONDS_PER_DAY = 86_400


def format_value(value: float) -> str:
    """A loss, a norm or a metric to four significant digits: `5.120`, `0.0731`, `1234`, `3.1e-05`, `nan`."""
    if not math.isfinite(value):
        return str(value)
    magnitude = abs(float(f"{value:.4g}"))
    if magnitude == 0:
        return "0"
    if magnitude < 1e-3 or magnitude >= 1e5:
        return f"{value:.1e}"
    decimals = 4 if magnitude < 1 else max(0, 3 - int(math.log10(magnitude)))
    return f"{value:.{decimals}f}"


def format_learning_rate(rate: float) -> str:
    """`3.2e-04`; plain from a hundredth up, where people write it so: `0.05`."""
    if rate == 0 or not math.isfinite(rate):
        return f"{rate:g}"
    return f"{rate:.3g}" if abs(rate) >= 0.01 else f"{rate:.1e}"


def format_count(count: float) -> str:
    """Three significant digits and a metric suffix: `7.25`, `950`, `12.3k`, `1.23M`."""
    if not math.isfinite(count):
        return str(count)
    scaled, suffixes = abs(count), ["", "k", "M", "G", "T"]
    index = 0
    # 999.5 would round to "1000" and be one character wider than every other number.
    while scaled >= 999.5 and index < len(suffixes) - 1:
        scaled, index = scaled / 1000, index + 1
    decimals = 0 if scaled >= 99.95 or scaled == 0 else 1 if scaled >= 9.995 else 2
    return f"{'-' if count < 0 else ''}{scaled:.{decimals}f}{suffixes[index]}"


def format_rate(per_second: float, unit: str) -> str:
    """`12.3k samples/s`."""
    return f"{format_count(per_second)} {unit}/s"


def format_loss_scale(scale: float) -> str:
    """A loss scale; powers of two from 1024 up as such: `2^16`."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 and scale >= 1024 else f"{scale:g}"


def format_duration(seconds: float) -> str:
    """The two largest units: `0.03 s`, `8.4 s`, `42 s`, `3m 07s`, `1h 02m`, `2d 05h`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds <= 0:
        return "0 s"
    if seconds < 59.5:
        decimals = 2 if seconds < 1 else 1 if seconds < 9.95 else 0
        return f"{seconds:.{decimals}f} s"
    rounded = round(seconds)
    if rounded < _SECONDS_PER_HOUR:
        return f"{rounded // _SECONDS_PER_MINUTE}m {rounded % _SECONDS_PER_MINUTE:02d}s"
    minutes = rounded // _SECONDS_PER_MINUTE
    if rounded < _SECONDS_PER_DAY:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    return f"{rounded // _SECONDS_PER_DAY}d {rounded % _SECONDS_PER_DAY // _SECONDS_PER_HOUR:02d}h"


def format_metric(name: str, value: float) -> str:
    """A metric's value; accuracies as a percentage."""
    name = name.removesuffix("_of_last").removesuffix("_of_average")
    is_share = name == "accuracy" or name.endswith("_accuracy")
    return f"{100 * value:.2f}%" if is_share and math.isfinite(value) else format_value(value)


def format_bytes(size_bytes: float) -> str:
    """`512 B`, `1.50 MiB`; signed."""
    scaled, units = abs(float(size_bytes)), ["B", "KiB", "MiB", "GiB", "TiB"]
    index = 0
    while scaled >= 1023.5 and index < len(units) - 1:
        scaled, index = scaled / 1024, index + 1
    text = f"{scaled:.0f}" if index == 0 or scaled >= 99.95 else f"{scaled:.1f}" if scaled >= 9.995 else f"{scaled:.2f}"
    return f"{'-' if size_bytes < 0 else ''}{text} {units[index]}"


def shorten_middle(text: str, width: int) -> str:
    """The text, its middle replaced by `..` where it is longer than `width` (at least 5) characters."""
    if len(text) <= width:
        return text
    tail = (width - 2 + 1) // 2
    return f"{text[: width - 2 - tail]}..{text[-tail:]}"
