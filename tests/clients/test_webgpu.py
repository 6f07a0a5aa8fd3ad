"""The JavaScript client on WebGPU, computed in software by Chromium's own adapter, against the Python client."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward_device import Trainer
from tests.clients.chromium import CHROMIUM, Page, open_page
from tests.clients.test_demo_page import Quiet
from tests.clients.test_javascript_client import CLIENT, MODULES, as_json
from tests.device.bundles import BATCH, batches, bundle_of, samples
from tests.mlp import save_mlp

SOFTWARE = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")
SCRIPT = """(async () => {
  const [ort, { Trainer }] = await Promise.all(
    ["./runtime/ort.webgpu.bundle.min.mjs", "./client/index.js"].map((one) => import(one)));
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = new URL("./runtime/", location.href).href;
  const trainer = await Trainer.load(new URL("./bundle", location.href),
    { runtime: ort, sessionOptions: { executionProviders: ["webgpu"] } });
  const losses = [];
  for (const batch of await (await fetch("./batches.json")).json()) losses.push(await trainer.trainStep(batch));
  const [batch] = await (await fetch("./batches.json")).json();
  const locations = await trainer.stateLocations();
  return { losses, locations, updates: await trainer.updates(), metrics: await trainer.evaluate([batch]) };
})()"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A page whose browser has WebGPU, next to the client, the runtime and a bundle."""
    if CHROMIUM is None or not (MODULES / "onnxruntime-web").exists():
        pytest.skip("there is no chromium, or no node_modules (`make clients`): WebGPU is not tested")
    site = tmp_path / "site"
    (site / "runtime").mkdir(parents=True)
    for path in (MODULES / "onnxruntime-web" / "dist").glob("ort*"):
        if path.name == "ort.webgpu.bundle.min.mjs" or "asyncify" in path.name:
            shutil.copy(path, site / "runtime")
    compiler = ["node", str(MODULES / "typescript" / "bin" / "tsc"), "--outDir", str(site / "client")]
    subprocess.run(compiler, cwd=CLIENT, check=True)
    (site / "index.html").write_text("<p>here</p>")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with open_page(f"http://127.0.0.1:{server.server_address[1]}/", tmp_path, options=SOFTWARE) as opened:
                opened.wait_for("document.body?.innerText === 'here'", 300)
                yield opened
        finally:
            server.shutdown()


def test_webgpu_trains_as_python_does(page: Page, tmp_path: Path) -> None:
    """The state stays in buffers of the GPU, but for counters, which are computed with on the CPU."""
    adapter = page.evaluate("navigator.gpu?.requestAdapter().then((one) => one?.info.architecture)")
    if adapter is None:
        pytest.skip("this chromium has no WebGPU adapter in software: WebGPU is not tested")
    save_mlp(tmp_path)
    bundle_of(tmp_path, training={"mapped_dimensions": {"batch": BATCH}}).rename(tmp_path / "site" / "bundle")
    found = batches(samples(), 50)
    (tmp_path / "site" / "batches.json").write_text(json.dumps([as_json(batch) for batch in found]))
    trainer = Trainer.load(tmp_path / "site" / "bundle")
    expected = [trainer.train_step(batch) for batch in found]
    trained = page.evaluate(SCRIPT)
    assert trained["losses"] == pytest.approx(expected, abs=1e-4)
    assert trained["updates"] == 50
    assert trained["metrics"] == pytest.approx(trainer.evaluate(found[:1]), abs=1e-4)
    weights = {one["name"] for one in trainer.bundle.manifest["state"] if one["kind"] in ("weight", "moment")}
    assert {trained["locations"][name] for name in weights} == {"gpu-buffer"}
