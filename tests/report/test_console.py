"""The console in both modes: plain and aligned in a log, in place on a terminal, tidy when it goes."""

from __future__ import annotations

import io
import os
import pty
import re
import sys

import pytest

from onward.report.console import ConsoleWatcher
from tests.report.events import checkpoint_report, evaluation_report, run_summary, step_report


def _watch_a_run(watcher: ConsoleWatcher) -> None:
    watcher.on_message("resumed from checkpoint 00000005")
    for update in (10, 100, 200):
        watcher.on_step(step_report(update, tokens_per_second=38_100.0, loss_scale=65536.0))
    watcher.on_evaluation(evaluation_report(200))
    watcher.on_checkpoint(checkpoint_report(200))
    watcher.on_end(run_summary())
    watcher.close()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> tuple[io.StringIO, ConsoleWatcher]:
    """A stream that stands for a terminal of 80 columns, and a live watcher on it whose clock stands still."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    return stream, ConsoleWatcher(stream, live=True, clock=lambda: 0.0)


def test_a_log_gets_plain_aligned_lines_one_per_event() -> None:
    stream = io.StringIO()
    _watch_a_run(ConsoleWatcher(stream))
    lines = stream.getvalue().splitlines()
    assert lines[:6] == [
        "note   resumed from checkpoint 00000005",
        "train  step  10/400   loss 5.123     lr 3.2e-04   grad 1.250     12.3k samples/s   38.1k tokens/s   "
        "1h 02m left    scale 2^16",
        "train  step 100/400   loss 5.123     lr 3.2e-04   grad 1.250     12.3k samples/s   38.1k tokens/s   "
        "1h 02m left    scale 2^16",
        "train  step 200/400   loss 5.123     lr 3.2e-04   grad 1.250     12.3k samples/s   38.1k tokens/s   "
        "1h 02m left    scale 2^16",
        "eval   step 200       loss 4.500     accuracy 61.23%    1,797 samples in 2.1 s",
        "saved  step 200       /somewhere/out/checkpoints/00000200   stalled 0.03 s",
    ]
    assert "summary" in lines
    assert "  loss                 5.123 → 1.632" in lines
    assert "\x1b" not in stream.getvalue()


def test_a_log_is_written_at_once_so_that_it_can_be_followed() -> None:
    class Stream(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    stream = Stream()
    ConsoleWatcher(stream).on_step(step_report())
    assert stream.flushed.endswith("\n")


def test_colour_asked_for_by_the_environment_stays_out_of_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    _watch_a_run(ConsoleWatcher(stream))
    assert "\x1b" not in stream.getvalue()


def test_a_log_in_ascii_takes_any_text() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    watcher = ConsoleWatcher(stream)
    watcher.on_message("données/φ.pb")
    watcher.on_end(run_summary())
    assert b"note   donn\\xe9es/\\u03c6.pb\n" in raw.getvalue()
    assert b"5.123 -> 1.632" in raw.getvalue()


def test_a_message_with_several_lines_keeps_them() -> None:
    stream = io.StringIO()
    ConsoleWatcher(stream).on_message("profile:\n  a   b")
    assert stream.getvalue() == "note   profile:\n         a   b\n"


def test_rounds_after_the_first_are_named() -> None:
    stream = io.StringIO()
    watcher = ConsoleWatcher(stream)
    watcher.on_step(step_report(10, round=1))
    watcher.on_end(run_summary(round=1))
    assert "train  round 1  step  10/400" in stream.getvalue()
    assert "summary of round 1" in stream.getvalue()


def test_a_real_terminal_is_recognised_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a pseudo-terminal: the live lines come, then go, and the cursor is shown again."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    controller, terminal = pty.openpty()
    with open(terminal, "w") as stream, open(controller, "rb", buffering=0) as reader:
        watcher = ConsoleWatcher(stream)
        assert watcher.live
        _watch_a_run(watcher)
        output = b""
        while b"checkpoint  " not in output or not output.endswith(b"\r\n\r\n"):
            output += reader.read(4096)
    text = output.decode()
    assert "━" in text
    assert "\x1b[2K" in text, "the live lines are erased"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"
    assert "╭─" in text
    assert "summary" in text


def test_a_dumb_terminal_gets_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    controller, terminal = pty.openpty()
    with open(terminal, "w") as stream:
        assert not ConsoleWatcher(stream).live
    os.close(controller)


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 131, 132, 200])
def test_live_lines_fit_every_terminal_and_never_change_their_number(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    watcher = ConsoleWatcher(io.StringIO(), live=True, clock=lambda: 0.0)
    heights = set()
    for update in (10, 20, 400):
        watcher._report = step_report(
            update,
            loss=10.0**update if update < 300 else float("nan"),
            tokens_per_second=38_100.0 if update > 10 else None,
            loss_scale=65536.0,
            skipped_updates=update - 10,
            data_wait_seconds=update / 1000,
        )
        watcher._history.append(1.0 / update)
        lines = watcher._console.render_lines(watcher._draw(), pad=False)
        widths = [sum(segment.cell_length for segment in line) for line in lines]
        assert max(widths) <= columns
        heights.add(len(lines))
    assert heights == {2 if columns >= 132 else 3}


def test_eighty_columns_show_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    watcher = ConsoleWatcher(io.StringIO(), live=True, clock=lambda: 0.0)
    watcher._report = step_report(
        20, tokens_per_second=38_100.0, loss_scale=65536.0, skipped_updates=2, data_wait_seconds=0.3
    )
    text = "\n".join(
        "".join(segment.text for segment in line) for line in watcher._console.render_lines(watcher._draw())
    )
    for part in ("step  20/400", "5%", "1h 02m left", "loss 5.123", "lr 3.2e-04", "grad 1.250", "12.3k samples/s"):
        assert part in text
    for part in ("38.1k tokens/s", "scale 2^16", "skipped 2", "data wait 15%"):
        assert part in text


def test_the_time_left_runs_down_between_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    now = 0.0
    watcher = ConsoleWatcher(io.StringIO(), live=True, clock=lambda: now)
    watcher.on_step(step_report(10, seconds_left=100.0))
    now = 40.0
    text = "".join(segment.text for line in watcher._console.render_lines(watcher._draw()) for segment in line)
    watcher.close()
    assert "1m 00s left" in text


def test_prints_of_other_code_do_not_tear_the_live_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    watcher = ConsoleWatcher(sys.stdout, live=True)
    watcher.on_step(step_report(10))
    print("a word from elsewhere")
    watcher.close()
    output = capsys.readouterr().out
    before = output[: output.index("a word from elsewhere")]
    assert before.rindex("\x1b[2K") > before.rindex("step"), "the live lines are erased before it"


def test_a_round_that_is_interrupted_leaves_its_last_line(terminal: tuple[io.StringIO, ConsoleWatcher]) -> None:
    stream, watcher = terminal
    watcher.on_step(step_report(120))
    watcher.close()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).split("\r")[-1]
    assert "train  step 120/400   loss 5.123" in last
    watcher.close()


def test_long_lines_wrap_under_their_beginning(terminal: tuple[io.StringIO, ConsoleWatcher]) -> None:
    stream, watcher = terminal
    watcher.on_message("word " * 30)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("       word") for line in lines[1:])
    assert max(map(len, lines)) <= 80
