"""One failure ends all: whatever ends a rank is reported to all ranks, and shown once, with the rank that it came from.

The first failure is shown by the rank that has it (or that found another one dead); only then the rest end, without a
word and with the same exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from onward.errors import Interrupted, OnwardError, UserError
from onward.parallel.rendezvous.launcher import Launch, detect
from onward.parallel.rendezvous.rendezvous import StrayError, UnreachableStoreError, open_store
from onward.parallel.rendezvous.run_store import ForeignEntryError, RunStore
from onward.parallel.watch.cause import cause_of, leave_cause
from onward.parallel.watch.ending import end_process, exit_code_of, is_echo, words
from onward.parallel.watch.heartbeats import SHUTDOWN_GRACE_SECONDS, HeartbeatMonitor


class CommunicationError(OnwardError):
    """Ranks that lost each other, or waited for each other too long."""


class Membership:
    """This process as one of a run's: the monitor of heartbeats while it takes part, and whether the run is over.

    Attributes:
        monitor: None before `begin` and after `end`, and in a world of one.
        is_over: all ranks have finished their work.
    """

    def __init__(self) -> None:
        self.monitor: HeartbeatMonitor | None = None
        self.is_over = False

    def begin(self, store: RunStore, launch: Launch, timeout_seconds: float, folder: Path | None = None) -> None:
        """From now on the failure of any rank ends this process, and its failure ends the others.

        Args:
            store: of this start.
            launch: this process among the others.
            timeout_seconds: of collectives, for messages.
            folder: of the file that tells where every rank is when they hang.
        """
        self.is_over = False
        self.monitor = HeartbeatMonitor(store, launch, timeout_seconds, folder)
        atexit.register(self._at_exit)

    def end(self) -> None:
        """This rank is done; its end is no failure."""
        monitor, self.monitor, self.is_over = self.monitor, None, True
        if monitor is not None:
            atexit.unregister(self._at_exit)
            monitor.stop()

    def note_progress(self) -> None:
        """Counts an update, so that a message about a hang can say who fell behind."""
        if self.monitor is not None:
            self.monitor.progress += 1

    def _at_exit(self) -> None:
        """A program that ends without `stop` is done, or failed with an exception that nobody caught."""
        error = getattr(sys, "last_value", None)
        if self.monitor is not None and error is not None:
            first, is_mine = self.monitor.report(error)
            if is_mine:
                self.monitor.let_end(1)
            self.monitor.end_after_showing(first.exit_code)
        self.end()


@contextlib.contextmanager
def ending_together(title: str = "onward") -> Iterator[Membership]:
    """Whatever ends this rank inside ends all ranks; in a world of one, exceptions just pass.

    The rank that failed first shows its exception (a traceback only where it is none of onward's); the others end
    without a word and with the same exit code: 2 for `UserError`, 3 for `Interrupted`, else 1. `Interrupted` must come
    on all ranks, as it does after `UpdateAgreement`; rank 0 shows it.

    Args:
        title: what the message begins with.

    Yields:
        What `start` joins the run with, so that a failure inside finds the monitor.
    """
    membership = Membership()
    try:
        yield membership
    except (GeneratorExit, SystemExit):
        raise
    except BaseException as error:
        try:
            launch = detect()
        except UserError:
            raise error from None
        if launch.world_size == 1:
            leave_cause(cause_of(error, words(error), 0))
            raise
        _end_together(membership, error, launch, title)


def _end_together(membership: Membership, error: BaseException, launch: Launch, title: str) -> NoReturn:
    exit_code, monitor = exit_code_of(error), membership.monitor
    if membership.is_over or isinstance(error, (StrayError, UnreachableStoreError)):
        _show(error, title)
        end_process(exit_code)
    try:
        watch = monitor or HeartbeatMonitor(open_store(launch, 2 * SHUTDOWN_GRACE_SECONDS), launch, 0.0)
        if isinstance(error, Interrupted):
            watch.meet_at_end("interrupted", watch.timeout_seconds)
            if launch.rank != 0:
                watch.end_after_showing(exit_code)
            _show(error, title)
        else:
            first, is_mine = watch.report(error)
            if not is_mine:
                watch.end_after_showing(first.exit_code)
            error.add_note(f"This was rank {launch.rank} of {launch.world_size} on {socket.gethostname()}; all end.")
            _show(CommunicationError(first.text) if is_echo(error) else error, title)
        watch.let_end(exit_code)
    except ForeignEntryError as foreign:
        if monitor is not None:
            monitor.end_on_foreign_entry(foreign)
        _show(foreign, title)
    except (UserError, dist.DistError):
        # Nobody to tell: the others have not come, or are gone.
        if monitor is not None and is_echo(error):
            monitor.end_without_store()
        _show(error, title)
    end_process(exit_code)


def _show(error: BaseException, title: str) -> None:
    if isinstance(error, KeyboardInterrupt):
        error = OnwardError("interrupted; nothing was saved.")
    if isinstance(error, OnwardError):
        sys.stderr.write("\n".join([f"{title}: {error}", *getattr(error, "__notes__", ())]) + "\n")
    else:
        traceback.print_exception(error)
