"""The history of a run as columns of equal length, also where a metric comes late."""

from __future__ import annotations

import math

from onward.fitting.history import History
from tests.report.events import checkpoint_report, evaluation_report, run_summary, step_report


def test_a_row_for_each_update() -> None:
    history = History()
    for update, loss in ((1, 2.0), (2, 1.0)):
        history.on_step(step_report(update, loss=loss))
    assert history.loss == [2.0, 1.0]
    assert {len(column) for column in history.steps.values()} == {2}


def test_metrics_that_come_late_or_not_again() -> None:
    history = History()
    history.on_evaluation(evaluation_report(1, {"loss": 2.0}))
    history.on_evaluation(evaluation_report(2, {"loss": 1.0, "f1": 0.5}))
    history.on_evaluation(evaluation_report(3, {"f1": 0.75}))
    assert history.evaluations["update"] == [1, 2, 3]
    assert history.evaluations["loss"][:2] == [2.0, 1.0]
    assert math.isnan(history.evaluations["loss"][2])
    assert math.isnan(history.evaluations["f1"][0])
    assert "0.75" in history._repr_html_()


def test_what_it_shows_of_itself() -> None:
    history = History()
    assert repr(history) == "History(0 displayed updates, 0 evaluations)"
    assert history._repr_html_() == ""
    history.on_step(step_report(1, loss=2.0))
    history.on_message("note")
    history.on_checkpoint(checkpoint_report())
    history.on_end(run_summary())
    history.close()
    assert repr(history) == "History(1 displayed updates, loss 2 to 2, 0 evaluations)"
    assert (history.messages, len(history.summaries)) == (["note"], 1)
