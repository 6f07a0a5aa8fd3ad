"""`onward report`: a page that needs nothing else, of one run and of several, looked at in a real browser."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from onward.cli import main
from onward.report.page.run_record import read_run
from tests.clients.chromium import CHROMIUM, HEADLESS
from tests.mlp import data, save_mlp, write_shards


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The output folders of two small runs that differ in their learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    save_mlp(folder)
    write_shards(folder / "train", data(24))
    write_shards(folder / "test", data(9, seed=1))
    for name, rate in (("slow", 0.01), ("fast", 0.2)):
        run = {
            "paths": {"model_path": "mlp.onnx", "train_data_dir": "train", "test_data_dir": "test", "output_dir": name},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"},
            "training": {"batch_size": 4, "num_train_steps": 30, "display_loss_steps": 2, "evaluation_period": 10},
            "learning_rate": {"initial_lr": rate},
            "checkpoint": {"checkpoints_dir": f"{name}/checkpoints"},
            "tensorboard": {"log_dir": f"{name}/tensorboard"},
            "profiler": {"first_step": 5, "last_step": 8},
            "machine": {"execution_provider": "CPU", "threads": 1},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(run))
        assert main(["train", str(folder / f"{name}.yaml")]) == 0
    return folder / "slow", folder / "fast"


class Outline(html.parser.HTMLParser):
    """Headings, and every address that a browser would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        found = dict(attrs)
        self.fetched += [str(found[name]) for name in ("src", "href") if name in found]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2") and data.strip():
            self.headings.append(data)


def test_the_page_of_one_run(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    slow, _ = runs
    assert main(["report", str(slow)]) == 0
    assert capsys.readouterr().out == f"wrote {slow / 'report.html'}\n"
    page = (slow / "report.html").read_text()
    outline = Outline(page)
    sections = ["Results", "Curves", "Plan and memory", "Slowest nodes", "Settings"]
    assert outline.headings[:6] == ["slow", *sections]
    assert all(address.startswith("#") for address in outline.fetched), "the page fetches something"
    assert "url(" not in page
    assert "@import" not in page
    for words in ("evaluation accuracy", "learning_rate.initial_lr", "<td>0.01</td>", "rank 0", "Gemm", "<pre>Plan of"):
        assert words in page
    titles = re.findall(r"<figcaption>(.*?)(?: <span|</figcaption>)", page)
    assert titles[:2] == ["Loss", "Gradient norm"]
    assert "Evaluation accuracy" in titles


def test_several_runs_are_compared(runs: tuple[Path, Path], tmp_path: Path) -> None:
    slow, fast = runs
    page_path = tmp_path / "compared.html"
    assert main(["report", str(slow), str(fast), "-o", str(page_path), "--no-plan"]) == 0
    page = page_path.read_text()
    assert Outline(page).headings[0] == "2 runs"
    finals = {
        name: read_run(folder, name).final["evaluation loss"] for name, folder in (("slow", slow), ("fast", fast))
    }
    assert finals["fast"] < finals["slow"]
    (row,) = re.findall(r"<tr><td>evaluation loss</td>(.*?)</tr>", page)
    marked = re.findall(r'<td class="number( best)?">([\d.]+)</td>', row)
    assert [mark for mark, _ in marked] == ["", " best"]
    assert "<td><code>learning_rate.initial_lr</code></td><td>0.01</td><td>0.2</td>" in page
    for legend in ("slow training", "slow evaluation", "fast training", "fast evaluation"):
        assert f"{legend}</li>" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_shows_it_and_the_pointer_reads_values(runs: tuple[Path, Path], tmp_path: Path) -> None:
    main(["report", str(runs[0]), "-o", str(tmp_path / "page.html"), "--no-plan"])
    probe = """<script>
      const svg = document.querySelector("figure.chart svg"), area = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove", {clientX: area.left + area.width, clientY: area.top + 20}));
      const box = document.querySelector(".values");
      document.title = JSON.stringify({
        hidden: box.hidden, values: [...box.children].map((one) => one.textContent),
        wide: document.documentElement.scrollWidth <= document.documentElement.clientWidth,
        chart: [area.width > 200, area.height > 100],
      });
    </script>"""
    errors = "<script>window.onerror = (text) => { document.title = `error: ${text}`; };</script>"
    page = (tmp_path / "page.html").read_text()
    page = page.replace("<head>", f"<head>{errors}", 1).replace("</body>", f"{probe}</body>")
    (tmp_path / "probed.html").write_text(page)
    command = [str(CHROMIUM), *HEADLESS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,900"]
    done = subprocess.run(
        [*command, "--dump-dom", f"file://{tmp_path / 'probed.html'}"], capture_output=True, text=True, timeout=120
    )
    (title,) = re.findall(r"<title>(.*?)</title>", done.stdout)
    told = json.loads(title)
    assert told["hidden"] is False
    assert told["wide"], "the page scrolls sideways"
    assert told["chart"] == [True, True]
    assert [re.sub(r"[\d.]+", "N", text) for text in told["values"]] == [
        "training: N (update N)",
        "evaluation: N (update N)",
    ]
    assert told["values"][0].endswith("(update 30)")
    shot = tmp_path / "page.png"
    subprocess.run([*command, f"--screenshot={shot}", f"file://{tmp_path / 'page.html'}"], timeout=120, check=True)
    assert shot.stat().st_size > 20_000


def test_folders_that_hold_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == (
        f"onward report: {str(tmp_path / 'none')!r} is not a folder; pass the output folder of a run.\n"
    )
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"onward report: {str(tmp_path)!r} holds no metrics.jsonl, nor does a folder in it. Pass the folder of a run "
        "that was trained with tensorboard.log_dir set.\n"
    )


def test_a_run_that_cannot_be_planned_again(runs: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(runs[0], tmp_path / "run")
    for manifest in list((tmp_path / "run").rglob("manifest.json")):
        shutil.rmtree(manifest.parent)
    for resolved in list((tmp_path / "run").rglob("resolved.yaml")):
        resolved.unlink()
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run/report.html").read_text()
    assert "There is no plan: the run&#x27;s parameters are not in its folder." in page
