"""Announces the phases of a run that take long, as a watcher of the run."""

from __future__ import annotations

from onward.report.phases import Phases
from onward.report.watching import Watchers


class PhaseWatcher(Watchers):
    """Begins and ends phases as the run reports them; all other events leave it unmoved.

    Args:
        phases: announce.
    """

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self._phases = phases

    def on_phase(self, name: str | None) -> None:
        """Begins a phase, or ends it."""
        self._phases.begin(name)

    def close(self) -> None:
        """The run is over."""
        self._phases.end()
