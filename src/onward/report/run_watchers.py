"""The watchers that a run has by itself on the rank that reports: progress, and the files of `tensorboard.log_dir`."""

from __future__ import annotations

import sys

from onward.engine.reports import Watcher
from onward.parameters import TensorBoard
from onward.report.console import ConsoleWatcher
from onward.report.watching import Watchers, make_watchers


class RunWatchers:
    """Adds a run's own watchers to those that the user gave.

    Args:
        watchers: of the run.
    """

    def __init__(self, watchers: Watchers) -> None:
        self._watchers = watchers
        self._progress: Watcher | None = None
        self._opening: _OpeningMessages | None = None
        self._files: tuple[Watcher, ...] = ()

    def begin(self, rank: int, shows_progress: bool) -> None:
        """On rank 0 shows progress from now on, and remembers messages for files that cannot be opened yet."""
        if self._opening is not None or rank:
            return
        if shows_progress:
            self._progress = progress_watcher()
            self._watchers.add([self._progress])
        self._opening = _OpeningMessages()
        self._watchers.add([self._opening])

    def open_files(self, board: TensorBoard, resumed_update: int | None) -> None:
        """Opens TensorBoard's files and `metrics.jsonl`, cut back to the update that the run goes on from.

        Raises:
            StorageError: a file cannot be made.
        """
        opening = self._opening
        if opening is None or opening not in self._watchers.watchers:
            return
        self._watchers.remove([opening])
        if board.log_dir is None:
            return
        files = make_watchers(
            metrics_path=board.log_dir / "metrics.jsonl",
            tensorboard_dir=board.log_dir,
            scalar_names=board.scalar_names,
            histogram_names=board.histogram_names,
            norm_names=board.norm_names,
            resumed_update=resumed_update,
        )
        for text in opening.texts:
            files.on_message(text)
        self._watchers.add(files.watchers)
        self._files = files.watchers

    def leave_screen(self) -> None:
        """Leaves a terminal as it was; progress comes back with the next event."""
        if self._progress is not None:
            self._progress.close()

    def close(self) -> None:
        """Closes what was added here."""
        own = [*self._files, *([] if self._progress is None else [self._progress])]
        closing = Watchers(watcher for watcher in own if watcher in self._watchers.watchers)
        self._watchers.remove(own)
        closing.close()
        self._watchers.failures += closing.failures


def progress_watcher() -> Watcher:
    """What shows progress here: in a notebook lines that are updated in place, else the console."""
    if is_notebook():
        from onward.report.notebook import NotebookWatcher

        return NotebookWatcher()
    return ConsoleWatcher()


def is_notebook() -> bool:
    """Whether this process is a notebook's kernel, which shows what is displayed."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class _OpeningMessages(Watchers):
    """Keeps what is reported before the files that record it can be opened."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        """Remembers."""
        self.texts.append(text)


__all__ = ["RunWatchers", "is_notebook", "progress_watcher"]
