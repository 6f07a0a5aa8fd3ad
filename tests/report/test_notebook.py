"""What a notebook shows: progress that is updated in place, tables of values; looked at in a real kernel, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import onward
from onward.parameters import Parameters
from onward.plan.costs.costs import GraphCosts
from onward.plan.decision import make_plan
from onward.plan.topology import Topology
from onward.report.notebook import KEPT_LINES, NotebookWatcher
from tests.mlp import build_mlp, data
from tests.report.events import checkpoint_report, evaluation_report, run_summary, step_report

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = onward.Environment(execution_provider="CPU", threads=1)

NO_COSTS = GraphCosts(nodes={}, value_bytes={}, weight_bytes={})


class Screen:
    """Remembers what each display showed last, and how often it was drawn."""

    def __init__(self) -> None:
        self.displays: list[list[tuple[str, str]]] = []

    def show(self, plain: str, page: str, handle: Any) -> int:
        if handle is None:
            self.displays.append([])
            handle = len(self.displays) - 1
        self.displays[handle].append((plain, page))
        return int(handle)


def test_one_display_is_updated_in_place() -> None:
    screen, now = Screen(), 0.0
    watcher = NotebookWatcher(screen.show, lambda: now)
    watcher.on_message("resumed <from> somewhere")
    for update in range(1, 401):
        now += 0.01
        watcher.on_step(step_report(update, loss=5.0 - update / 100))
    watcher.on_evaluation(evaluation_report(400))
    watcher.on_checkpoint(checkpoint_report(400))
    watcher.on_end(run_summary())
    (display,) = screen.displays
    assert len(display) < 30  # 4 seconds at 4 a second, and what is forced
    plain, page = display[-1]
    lines = plain.splitlines()
    assert lines[0] == "note   resumed <from> somewhere"
    assert "resumed &lt;from&gt; somewhere" in page
    assert lines[1].startswith("eval   step 400   loss 4.500   accuracy 61.23%")
    assert lines[2].startswith("saved  step 400")
    assert lines[3].startswith("train  step 400/400   100%   epoch 0")
    assert "loss 1.000" in lines[4]
    assert any(line.startswith("throughput") for line in lines)
    assert '<progress value="400" max="400"' in page
    watcher.on_step(step_report(1, round=1))
    watcher.close()
    assert len(screen.displays) == 2  # the next round has its own
    assert "round 1  step 1/400" in screen.displays[1][-1][0]


def test_many_messages_do_not_fill_the_notebook() -> None:
    screen = Screen()
    watcher = NotebookWatcher(screen.show)
    for number in range(100):
        watcher.on_message(f"message {number}")
    lines = screen.displays[0][-1][0].splitlines()
    assert lines[0] == f"({100 - KEPT_LINES} earlier lines)"
    assert lines[-1] == "note   message 99"


def test_values_show_themselves() -> None:
    values = data(40)
    result: Any = onward.fit(
        build_mlp(), (values["x"], values["label"]), loss="cross_entropy", epochs=2, batch_size=8,
        validation_fraction=0.2, progress=False, environment=ON_CPU,
    )  # fmt: skip
    page = result._repr_html_()
    assert "<polyline" in page
    assert page.count("<table") == 2
    assert "evaluation accuracy" in page
    summary = result.summary._repr_html_()
    assert "stable_samples_per_second" in summary
    assert re.search(r"metrics</td><td[^>]*>loss ", summary)
    assert result.net._repr_html_().startswith('<div style="overflow-x: auto"><table class="onward">')
    assert "learning_rate" in step_report()._repr_html_()
    assert "accuracy 0.6123" in evaluation_report()._repr_html_()


def test_a_plan_shows_itself(tmp_path: Path) -> None:
    from onward.engine.building.preparation import read_training_graph
    from tests.mlp import parameters, save_mlp

    save_mlp(tmp_path)
    asked: Parameters = parameters(tmp_path, distributed={"data_parallel_size": 2, "zero_stage": 3})
    plan = make_plan(asked, Topology(data_size=2), read_training_graph(asked), {}, {}, lambda: NO_COSTS)
    assert "2 replicas, ZeRO 3" in plan._repr_html_()


def test_the_notebook_of_the_tutorial_runs(tmp_path: Path) -> None:
    """In its own kernel: no cell fails, progress is one display, values are shown as HTML."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("sklearn")
    notebook = nbformat.read(ROOT / "docs" / "tutorials" / "notebook.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # committed without
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]

    def pages(index: int) -> list[str]:
        return [output.data.get("text/html", "") for output in cells[index].outputs if "data" in output]

    (net,) = pages(1)
    assert "Conv" in net
    progress, result = pages(2)
    assert '<progress value="' in progress
    assert "loss was left out; chosen:" in progress
    assert "<polyline" in result
    assert not any(output.output_type == "stream" and "train  step" in output.text for output in cells[2].outputs)
    (summary,) = pages(4)
    assert "accuracy" in summary
    (accuracy,) = [output.data["text/plain"] for output in cells[5].outputs if "data" in output]
    assert float(accuracy) > 0.9
