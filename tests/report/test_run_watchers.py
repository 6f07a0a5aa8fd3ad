"""Where a run shows its progress."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from onward.report.console import ConsoleWatcher
from onward.report.notebook import NotebookWatcher
from onward.report.run_watchers import is_notebook, progress_watcher


class ZMQInteractiveShell:
    """Under the name that a notebook's shell has."""


def test_where_progress_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        shell: Any = None

        def get_ipython(self) -> Any:
            return self.shell

    module = Module()
    monkeypatch.setitem(sys.modules, "IPython", module)  # type: ignore[arg-type]
    assert not is_notebook()
    assert isinstance(progress_watcher(), ConsoleWatcher)
    module.shell = ZMQInteractiveShell()
    assert is_notebook()
    assert isinstance(progress_watcher(), NotebookWatcher)
