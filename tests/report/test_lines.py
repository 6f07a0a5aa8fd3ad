"""What training lines and the summary say, without a terminal."""

from __future__ import annotations

import math

from onward.engine.reports import StepReport
from onward.report.lines import SPARKLINE_SAMPLE, LossHistory, step_fields, summary_rows
from tests.report.events import run_summary, step_report


def _texts(report: StepReport, **given: bool) -> list[str]:
    return [f"{field.label} {field.value}".strip() for field in step_fields(report, **given)]


def test_a_plain_step_says_loss_rate_norm_and_speed() -> None:
    assert _texts(step_report()) == ["loss 5.123", "lr 3.2e-04", "grad 1.250", "12.3k samples/s"]


def test_everything_else_is_said_only_where_it_exists() -> None:
    report = step_report(20, tokens_per_second=38_100.0, loss_scale=65536.0, skipped_updates=2)
    assert _texts(report, with_time_left=True)[4:] == [
        "38.1k tokens/s",
        "1h 02m left",
        "scale 2^16",
        "skipped 2",
    ]


def test_waiting_for_data_is_a_share_of_the_time_since_the_last_report() -> None:
    """From the first report on."""
    assert "data wait 25%" in _texts(step_report(1, seconds=2.0, data_wait_seconds=0.5))
    assert not any("wait" in text for text in _texts(step_report(20, seconds=2.0, data_wait_seconds=0.05)))
    assert not any("wait" in text for text in _texts(step_report(20, seconds=0.0)))


def test_the_summary_says_all_that_was_asked_for() -> None:
    rows = dict(summary_rows(run_summary(), "->", lambda path: path))
    assert rows == {
        "steps": "400",
        "updates": "200, 2 of them skipped",
        "samples": "3,200 in batches of 8, 2 accumulated per update",
        "loss": "5.123 -> 1.632",
        "evaluation loss": "1.700",
        "evaluation accuracy": "81.23%",
        "throughput": "1.23k samples/s",
        "stable throughput": "1.30k samples/s over the last 128 steps",
        "time": "1h 02m, 1h 00m of it training",
        "checkpoint": "/somewhere/out/checkpoints/00000400",
    }


def test_a_single_step_is_counted_as_one() -> None:
    rows = dict(summary_rows(run_summary(steps=2), "->", lambda path: path))
    assert rows["stable throughput"] == "1.30k samples/s over the last step"


def test_a_round_without_steps_has_a_summary_too() -> None:
    summary = run_summary(steps=0, first_loss=None, last_loss=None, metrics={}, checkpoint=None)
    rows = dict(summary_rows(summary, "->", lambda path: path))
    assert "loss" not in rows
    assert rows["checkpoint"] == "none"


def test_a_sparkline_falls_with_the_loss_at_any_length() -> None:
    for count in (2, 16, 1000, 10_000):
        history = LossHistory()
        for index in range(count):
            history.append(math.exp(-3 * index / count))
        history.append(math.nan)
        bars = history.sparkline(16)
        assert len(bars) == 16
        heights = [SPARKLINE_SAMPLE.index(bar) for bar in bars.strip()]
        assert heights == sorted(heights, reverse=True)
        assert (heights[0], heights[-1]) == (7, 0)
        assert len(history._losses) <= LossHistory._KEPT


def test_a_sparkline_needs_two_losses_and_survives_equal_ones() -> None:
    history = LossHistory()
    history.append(1.0)
    assert history.sparkline(4) == "    "
    history.append(1.0)
    assert history.sparkline(4) == "▁▁  "


def test_a_run_that_skipped_most_of_its_updates_says_so() -> None:
    rows = dict(summary_rows(run_summary(skipped_updates=150), "->", lambda path: path))
    assert rows["updates"] == "200, 150 of them skipped (most): gradients were not finite, and little was trained"
    assert "most" not in dict(summary_rows(run_summary(skipped_updates=100), "->", lambda path: path))["updates"]


def test_mfu_and_peak_memory_where_they_are_known() -> None:
    report = step_report(mfu=0.4321, peak_memory_bytes=3 * 2**30)
    texts = [f"{f.label} {f.value}".strip() for f in step_fields(report)]
    assert "MFU 43%" in texts
    assert "memory 3.00 GiB" in texts
    assert not [f for f in step_fields(step_report()) if f.label in ("MFU", "memory")]
    rows = dict(summary_rows(run_summary(mfu=0.4321, peak_memory_bytes=3 * 2**30), "->", str))
    assert rows["MFU"] == "43.2% at the stable throughput"
    assert rows["peak process memory"] == "3.00 GiB"
    assert "MFU" not in dict(summary_rows(run_summary(), "->", str))


def test_the_summary_of_a_resumed_run_has_the_totals_of_the_round() -> None:
    since = {"steps_before": 1_000, "updates_before": 500, "samples_before": 8_000, "first_loss_of_round": 9.0}
    rows = dict(summary_rows(run_summary(**since), "->", str))
    assert rows["steps"] == "400 since step 1,000, 1,400 in total"
    assert rows["updates"] == "200 since step 1,000, 700 in total, 2 of them skipped"
    assert rows["samples"] == "3,200 since step 1,000, 11,200 in total in batches of 8, 2 accumulated per update"
    assert rows["loss"] == "5.123 -> 1.632 since step 1,000, 9.000 at the start of the round"
    assert rows["time"] == "1h 02m, 1h 00m of it training since step 1,000"
