"""What notebooks show, looked at in a real browser: hostile names run nothing, pages are readable in light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import onnx
import pytest

import onward
from onward.report.notebook import NotebookWatcher
from tests.mlp import build_mlp, data
from tests.report.events import evaluation_report, run_summary, step_report

CHROMIUM = shutil.which("chromium")
HOSTILE = ("<script>window.hit=1</script>", '"><img src=x onerror="window.hit=1">', "</pre></table><b>bold</b>")
LONG = "a_module_whose_name_is_long." * 12 + "weight"


def hostile_model(path: Path) -> Path:
    """Every name of a small network says something to a browser."""
    model = build_mlp()
    names = {"w1": HOSTILE[0], "b1": HOSTILE[1], "x": HOSTILE[2], "logits": HOSTILE[0] + "logits", "w2": LONG}
    graph = model.graph
    for node in graph.node:
        node.name = f"{node.name}{HOSTILE[1]}"
        for place in (node.input, node.output):
            place[:] = [names.get(one, one) for one in place]
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = HOSTILE[0]
    onnx.save(model, path)
    return path


def displays(folder: Path) -> dict[str, str]:
    """Every HTML that a notebook gets of a fit of that network, by what shows it."""
    arrays = data(24)
    path = hostile_model(folder / "hostile.onnx")
    result = onward.fit(
        path, {HOSTILE[2]: arrays["x"], "label": arrays["label"]}, loss="softmax_cross_entropy", label="label",
        prediction=HOSTILE[0] + "logits", epochs=3, batch_size=4, progress=False, validation_fraction=0.25,
    )  # fmt: skip
    pages: list[str] = []
    watcher = NotebookWatcher(lambda plain, page, handle: pages.append(page))
    watcher.on_message(f"weights: {HOSTILE[0]} {LONG}")
    watcher.on_step(step_report(10))
    watcher.on_evaluation(evaluation_report(10, {HOSTILE[1]: 0.5}))
    watcher.on_end(run_summary())
    shown = {
        "net": result.net, "summary": result.net.summary(), "result": result, "history": result.history,
        "run": result.summary, "evaluation": evaluation_report(10, {HOSTILE[1]: 0.5}), "step": step_report(),
    }  # fmt: skip
    return {**{name: one._repr_html_() for name, one in shown.items()}, "progress": pages[-1]}


def test_names_of_strangers_are_text(tmp_path: Path) -> None:
    found = displays(tmp_path)
    for name, page in found.items():
        for part in ("<script", "<img", "<b>", 'onerror="'):
            assert part not in page, name
    for name in ("net", "progress"):
        assert "&lt;script&gt;window.hit=1&lt;/script&gt;" in found[name]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize("is_dark", [False, True])
def test_a_browser_shows_them_within_the_cell(tmp_path: Path, is_dark: bool) -> None:
    """In a cell of 900 pixels; text is in the color of the page, so that dark themes can be read."""
    found = displays(tmp_path)
    cells = "".join(f'<section id="{name}">{page}</section>' for name, page in found.items())
    colors = "background: #111; color: #eee" if is_dark else "background: #fff; color: #111"
    probe = """<script>document.title = JSON.stringify({
        hit: window.hit === undefined,
        wide: [...document.querySelectorAll("section")].filter((one) => one.scrollWidth > one.clientWidth)
              .map((one) => one.id),
        colors: [...new Set([...document.querySelectorAll("section td, section th, section pre, figcaption")]
                 .map((one) => getComputedStyle(one).color))],
        text: document.body.innerText.includes("<" + "script>window.hit=1<" + "/script>"),
      })</script>"""
    page = f'<!doctype html><meta charset="utf-8"><title></title><body style="{colors}; width: 900px">{cells}{probe}'
    (tmp_path / "page.html").write_text(page)
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}",
    ]  # fmt: skip
    done = subprocess.run(
        [*command, "--dump-dom", f"file://{tmp_path / 'page.html'}"], capture_output=True, text=True, timeout=120
    )
    told = json.loads(next(iter(re.findall(r"<title>(.*?)</title>", done.stdout))).replace("&lt;", "<"))
    color = "rgb(238, 238, 238)" if is_dark else "rgb(17, 17, 17)"
    assert told == {"hit": True, "wide": [], "colors": [color], "text": True}
