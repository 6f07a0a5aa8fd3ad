"""Whether the machine's clocks go: a run's time limits, reports and checks of other ranks count by them.

Virtual machines that were paused, debuggers and time namespaces make clocks that stand still or jump.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from onward.diagnosis.findings import Finding

PAUSE_SECONDS = 0.05
_LONGEST_SECONDS = 5.0
"""A busy machine resumes a process late, but not by this much."""

_CLOCKS: dict[str, Callable[[], float]] = {
    "monotonic clock": lambda: time.monotonic(),
    "performance counter": lambda: time.perf_counter(),
}


def check_clock() -> Iterator[Finding]:
    """Every clock over one short sleep."""
    before = {name: read() for name, read in _CLOCKS.items()}
    time.sleep(PAUSE_SECONDS)
    passed = {name: read() - before[name] for name, read in _CLOCKS.items()}
    wrong = [name for name, seconds in passed.items() if not PAUSE_SECONDS / 2 <= seconds <= _LONGEST_SECONDS]
    for name in wrong:
        yield Finding(
            "clock",
            f"the {name} advanced by {passed[name]:.3f} s in a sleep of {PAUSE_SECONDS:g} s; nothing was timed",
            "problem",
            "Synchronize the machine's clock and restart what controls it (virtual machine, debugger, time namespace).",
        )
    if not wrong:
        yield Finding("clock", "advances as it should")
