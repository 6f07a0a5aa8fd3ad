"""The watchers that a run has by itself on the rank that reports: progress, its files, and experiment trackers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.checkpoint.reading import find_latest
from onward.engine.reports import Watcher
from onward.environment import Environment
from onward.errors import Interrupted, StorageError
from onward.parallel.launch.process import Mesh
from onward.parameters import Parameters
from onward.report.console import ConsoleWatcher
from onward.report.phase_watcher import PhaseWatcher
from onward.report.phases import Phases
from onward.report.run_folder import RECORD_NAME, RESOLVED_NAME
from onward.report.run_record import RunRecord, command_line, describe_run, hyperparameters, resolved_yaml
from onward.report.trackers.opening import check_packages, open_trackers
from onward.report.trackers.tracker import Tracker
from onward.report.watching import Watchers, make_watchers


class RunWatchers:
    """Adds a run's own watchers to those that the user gave.

    Args:
        watchers: of the run.
        parameters: of the run.
        most_log_lines: as of `ConsoleWatcher`.

    Raises:
        ParametersError: the package of a tracker is missing.
    """

    def __init__(self, watchers: Watchers, parameters: Parameters, most_log_lines: int | None = None) -> None:
        check_packages(parameters)
        self._most_log_lines = most_log_lines
        self._watchers = watchers
        self._progress: Watcher | None = None
        self._phases: PhaseWatcher | None = None
        self._opening: _OpeningMessages | None = None
        self._files: tuple[Watcher, ...] = ()
        self._record: RunRecord | None = None
        self._trackers: tuple[Tracker, ...] = ()

    def begin(self, rank: int, shows_progress: bool) -> None:
        """On rank 0 shows progress from now on, and remembers messages for files that cannot be opened yet."""
        if self._opening is not None or rank:
            return
        if shows_progress:
            self._progress = progress_watcher(self._most_log_lines)
            self._phases = PhaseWatcher(Phases(self._progress.on_message))
            self._watchers.add([self._progress, self._phases])
        self._opening = _OpeningMessages()
        self._watchers.add([self._opening])

    def open_files(
        self,
        parameters: Parameters,
        environment: Environment,
        mesh: Mesh,
        run_file: Path | None,
        resumed_update: int | None,
    ) -> None:
        """Opens the record of the run, its trackers, and the files of TensorBoard, cut back to the resumed update.

        Args:
            parameters, environment, mesh, run_file: of the run.
            resumed_update: the update of the checkpoint that was loaded; None: there was none.

        Raises:
            StorageError: a file cannot be made.
        """
        board, folder = parameters.tensorboard, parameters.paths.output_dir or parameters.tensorboard.log_dir
        opening = self._opening
        if opening is None or opening not in self._watchers.watchers:
            return
        about = describe_run(environment, mesh.world_size, run_file, command_line())
        about["notes"] = list(opening.texts)  # what `auto` chose, of which the parameters hold the outcome alone
        texts = {RESOLVED_NAME: resolved_yaml(parameters), RECORD_NAME: json.dumps(about, indent=1)}

        kept_in = parameters.checkpoint.checkpoints_dir
        # A run that starts from a checkpoint of another run is a new one in its trackers.
        continues = kept_in is not None and find_latest(kept_in) is not None

        def state_of(name: str) -> Mapping[str, Any]:
            return self._watchers.state_of(name) if continues else {}

        told = self._watchers.on_message
        self._trackers = tuple(open_trackers(parameters, folder, texts, tuple(opening.texts), state_of, told))
        self._watchers.remove([opening])
        self._watchers.add(self._trackers)
        if folder is None:
            return
        self._record = RunRecord(folder, texts[RESOLVED_NAME], about, resumed_update)
        self._watchers.add([self._record])
        self._files = (self._record,)
        if board.log_dir is None:
            return
        metrics_path = board.log_dir / "metrics.jsonl"
        if resumed_update is None and metrics_path.is_file() and folder not in (board.log_dir, *board.log_dir.parents):
            self._watchers.on_message(
                f"tensorboard.log_dir is {board.log_dir}, outside of paths.output_dir {folder}, and holds logs of an "
                f"earlier run, whose report would show this one. Set tensorboard.log_dir to a folder in {folder}."
            )
        files = make_watchers(
            metrics_path=metrics_path,
            tensorboard_dir=board.log_dir,
            scalar_names=board.scalar_names,
            histogram_names=board.histogram_names,
            norm_names=board.norm_names,
            resumed_update=resumed_update,
            texts=texts,
            hyperparameters=hyperparameters(parameters),
        )
        for text in opening.texts:
            files.on_message(text)
        self._watchers.add(files.watchers)
        self._files += files.watchers

    def finish(self, error: BaseException | None = None) -> None:
        """Records that the run is done, or with which kind of error it ended."""
        is_interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
        status = "done" if error is None else "interrupted" if is_interrupted else "failed"
        if error is None and self._record is not None and self._record.record["status"] == "interrupted":
            status = "interrupted"  # and returned, as `fit` does
        self._finish_trackers(status)
        if self._record is not None:
            with contextlib.suppress(StorageError):
                self._record.finish(status)

    def on_trained_model(self, what: str, paths: Sequence[str]) -> None:
        """Reports where the trained model is written, all its files, and has trackers refer to the first."""
        self._watchers.on_message(f"{what} written to {', '.join(paths)}.")
        if self._record is not None:
            self._record.on_trained_model(what, paths)
        for tracker in self._trackers:
            if tracker in self._watchers.watchers:
                try:
                    tracker.on_trained_model(paths[0])
                except Exception as error:
                    self._watchers.on_message(f"{type(tracker).__name__}: {type(error).__name__}: {error}")

    def _finish_trackers(self, status: str) -> None:
        """Ends the runs in trackers; what fails is reported, and is no failure of the run."""
        trackers = [tracker for tracker in self._trackers if tracker in self._watchers.watchers]
        self._trackers = ()
        self._watchers.remove(trackers)
        for tracker in trackers:
            tracker.finish(status)
            try:
                tracker.close()
            except Exception as error:
                self._watchers.on_message(
                    f"{type(tracker).__name__} could not complete its run: {type(error).__name__}: {error}"
                )

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Ends the run for phases, the terminal, callbacks, the record and trackers if something is raised inside."""
        try:
            yield
        except BaseException as error:
            self._watchers.on_phase(None)
            if self._progress is not None:
                self._progress.close()  # leaves a terminal as it was; progress comes back with the next event
            self._watchers.on_exception(error)
            self.finish(error)
            raise

    def close(self) -> None:
        """The run is over: closes what was added here."""
        self.finish()
        own = [*self._files, *(one for one in (self._phases, self._progress) if one is not None)]
        closing = Watchers(watcher for watcher in own if watcher in self._watchers.watchers)
        self._watchers.remove(own)
        closing.close()
        self._watchers.failures += closing.failures


def progress_watcher(most_log_lines: int | None = None) -> Watcher:
    """What shows progress here: in a notebook lines that are updated in place, else the console."""
    if is_notebook():
        from onward.report.notebook import NotebookWatcher

        return NotebookWatcher()
    return ConsoleWatcher(most_lines=most_log_lines)


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
