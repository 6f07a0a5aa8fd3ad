"""Where a run shows its progress."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from onward.cli import main
from onward.report.console import ConsoleWatcher
from onward.report.notebook import NotebookWatcher
from onward.report.run_watchers import is_notebook, progress_watcher
from tests.mlp import data, save_mlp, write_shards
from tests.test_cli import write_run


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


def test_logs_among_those_of_another_run_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`onward report` of the first run would show the second."""
    save_mlp(tmp_path)
    for name in ("train", "test"):
        write_shards(tmp_path / name, data(8))
    path = write_run(tmp_path, training={"num_train_steps": 1}, tensorboard={"log_dir": "out/logs"})
    told = f"tensorboard.log_dir is {tmp_path / 'out' / 'logs'}, outside of paths.output_dir"
    for folder, is_told in (("out", False), ("out", False), ("other", True)):
        kept_in = ["--checkpoint.checkpoints_dir", str(tmp_path / folder / "checkpoints")]
        assert main(["train", str(path), "--paths.output_dir", str(tmp_path / folder), *kept_in]) == 0
        assert (told in capsys.readouterr().out) == is_told, folder
