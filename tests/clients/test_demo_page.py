"""The page of `make demo-web` in a headless Chromium: somebody trains, draws, and takes the network away."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import runpy
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from safetensors import safe_open

from onward_device import Trainer
from tests.clients.chromium import CHROMIUM, Page, open_page
from tests.clients.test_javascript_client import MODULES, as_json
from tests.device.bundles import BATCH, batches, bundle_of, samples
from tests.mlp import save_mlp

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `dev/demo_web` builds."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium: the page of `make demo-web` is not tested")
    if not (MODULES / "onnxruntime-web").exists():
        pytest.skip("clients/javascript has no node_modules: run `make clients` to test the page of `make demo-web`")
    folder = tmp_path_factory.mktemp("demo") / "site"
    runpy.run_path(str(ROOT / "dev" / "demo_web"))["build"](folder)
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def served(site: Path) -> Iterator[int]:
    """A server of a folder; gives its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


IS_READY = "document.getElementById('status')?.textContent.startsWith('Ready')"


@pytest.fixture
def page(site: Path, tmp_path: Path) -> Iterator[Page]:
    """The page, ready, in a browser that keeps downloads in the test's folder."""
    with served(site) as port, open_page(f"http://127.0.0.1:{port}/", tmp_path) as opened:
        opened.wait_for(IS_READY, 300)
        yield opened


def text(page: Page, element: str) -> str:
    return str(page.evaluate(f"document.getElementById('{element}').textContent"))


def downloaded(folder: Path, name: str) -> Path:
    """Waits for a file."""
    for _ in range(300):
        if (folder / name).exists():
            return folder / name
        time.sleep(0.1)
    raise AssertionError(f"{name} was not downloaded; there are {[path.name for path in folder.iterdir()]}")


def test_somebody_trains_draws_and_takes_the_network_away(page: Page, site: Path, tmp_path: Path) -> None:
    page.click("#train-all")
    page.wait_for("document.getElementById('status').textContent.startsWith('Trained')", 300)
    assert text(page, "updates") == "45"
    accuracy = float(text(page, "accuracy").removesuffix(" %"))
    assert accuracy > 80
    assert page.evaluate("document.querySelector('#chart polyline').points.length") == 45

    x, y, width = page.evaluate(
        "(() => { const area = document.getElementById('drawing').getBoundingClientRect();"
        " return [area.x, area.y, area.width]; })()"
    )
    stroke = [(x + width * 0.5, y + width * (0.15 + 0.07 * step)) for step in range(11)]
    page.draw(stroke)
    page.wait_for("document.querySelector('#bars .best') !== null", 30)
    page.evaluate("document.getElementById('label').value = '1'")
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    page.click("#add")
    assert text(page, "count") == "1"
    assert page.evaluate("document.getElementById('add').disabled")  # nothing is drawn any more
    page.click("#train-own")
    page.wait_for("document.getElementById('status').textContent.startsWith('Trained 10 times')", 120)

    page.click("#export")
    session = onnxruntime.InferenceSession(downloaded(tmp_path, "trained.onnx"))
    page.wait_for("!document.getElementById('save').disabled", 30)
    page.click("#save")
    trainer = Trainer.load(site / "bundle")
    trainer.load_state(downloaded(tmp_path, "state.safetensors"))
    assert trainer.updates == 55
    digits = np.frombuffer((site / "digits.bin").read_bytes(), np.uint8).reshape(-1, 65)
    images = (digits[:, 1:] / np.float32(16)).reshape(-1, 1, 8, 8)
    (found,) = session.run(None, {"X": images})
    assert np.abs(found - trainer.predict({"X": images})["predictions"]).max() < 1e-4
    assert page.errors == []


def test_a_page_of_another_host_over_http_compares_checksums(site: Path, tmp_path: Path) -> None:
    """There, a browser has no crypto.subtle, in pages and in workers."""
    shutil.copytree(site, tmp_path / "site")
    options = ["--host-resolver-rules=MAP digits.example 127.0.0.1", "--disable-gpu"]
    with (
        served(tmp_path / "site") as port,
        open_page(f"http://digits.example:{port}/", tmp_path, options=options) as page,
    ):
        page.wait_for(IS_READY, 300)
        assert page.evaluate("[isSecureContext, crypto.subtle === undefined]") == [False, True]
        page.click("#save")
        state = downloaded(tmp_path, "state.safetensors")
        Trainer.load(site / "bundle").load_state(state)
        with safe_open(state, "numpy") as saved:
            assert len(saved.metadata()["sha256"]) == 64
        (tmp_path / "site" / "bundle" / "infer.onnx").write_bytes(b"damaged")
        page.call("Page.reload", ignoreCache=True)
        page.wait_for("document.getElementById('status')?.textContent.includes('infer.onnx of http://digits.')", 300)
        assert "was changed or damaged: its SHA-256 is " in text(page, "status")


def test_a_bundle_that_is_written_again_is_not_taken_from_the_cache(site: Path, tmp_path: Path) -> None:
    """A browser keeps files of servers that say nothing of it, for a tenth of their age: of a bundle some, not all."""
    shutil.copytree(site, tmp_path / "site")
    files = [path for path in (tmp_path / "site").rglob("*") if path.is_file()]
    for path in files:
        os.utime(path, (1e9, 1e9))
    manifest = tmp_path / "site" / "bundle" / "manifest.json"
    with served(tmp_path / "site") as port, open_page(f"http://127.0.0.1:{port}/", tmp_path) as page:
        page.wait_for(IS_READY, 300)
        manifest.write_text(manifest.read_text().replace('"onward-device"', '"another"', 1))
        page.call("Page.navigate", url=f"http://127.0.0.1:{port}/index.html")
        page.wait_for("document.getElementById('status')?.textContent.includes('is no manifest of a device')", 60)


def test_the_browser_trains_as_python_does(page: Page, site: Path) -> None:
    """50 steps with dropout, whose random numbers are arithmetic that every runtime does alike."""
    save_mlp(site, dropout=0.5)
    found = batches(samples())
    trainer = Trainer.load(bundle_of(site, training={"mapped_dimensions": {"batch": BATCH}}).rename(site / "mlp"))
    (site / "batches.json").write_text(json.dumps([as_json(batch) for batch in found]))
    script = """(async () => {
      const [ort, { Trainer }] = await Promise.all(
        ["./runtime/ort.wasm.bundle.min.mjs", "./client/index.js"].map((one) => import(one)));
      ort.env.wasm.numThreads = 1;
      ort.env.wasm.wasmPaths = new URL("./runtime/", location.href).href;
      const trainer = await Trainer.load(new URL("./mlp", location.href), { runtime: ort });
      const losses = [];
      for (const batch of await (await fetch("./batches.json")).json()) losses.push(await trainer.trainStep(batch));
      return losses;
    })()"""
    assert page.evaluate(script) == pytest.approx([trainer.train_step(batch) for batch in found], abs=1e-5)
