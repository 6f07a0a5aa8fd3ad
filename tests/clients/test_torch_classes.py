"""Optimizers of torch.optim in Node, a browser and C++, with accumulation and clipping, as in Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onward_device import Trainer
from tests.clients.chromium import Page
from tests.clients.test_cpp_client import compiled as compiled_cpp
from tests.clients.test_cpp_client import run as run_cpp
from tests.clients.test_javascript_client import as_json, check_losses
from tests.clients.test_javascript_client import compiled as compiled_javascript
from tests.clients.test_webgpu import SCRIPT, page
from tests.device.bundles import batches, bundle_of
from tests.device.test_step_graphs_classes import NAMES, PASSES, asked, given
from tests.mlp import save_mlp

__all__ = ["compiled_cpp", "compiled_javascript", "page"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_node_and_cpp(name: str, compiled_cpp: Path, compiled_javascript: Path, tmp_path: Path) -> None:
    save_mlp(tmp_path)
    trainer, found = Trainer.load(bundle_of(tmp_path, **asked(name))), batches(given(), PASSES)
    losses = [trainer.train_step(batch) for batch in found]
    assert run_cpp(compiled_cpp, tmp_path, found, "losses")["losses"] == pytest.approx(losses, abs=1e-5)
    check_losses(compiled_javascript, tmp_path, trainer, found, losses)


@pytest.mark.slow
def test_a_browser(page: Page, tmp_path: Path) -> None:
    """By wasm, and on WebGPU where there is an adapter."""
    save_mlp(tmp_path)
    site, found = tmp_path / "site", batches(given(), PASSES)
    (site / "batches.json").write_text(json.dumps([as_json(batch) for batch in found]))
    providers = ["wasm", "webgpu"] if page.evaluate("navigator.gpu?.requestAdapter()") else ["wasm"]
    for name in NAMES:
        bundle_of(tmp_path, **asked(name)).rename(site / name)
        trainer = Trainer.load(site / name)
        losses = [trainer.train_step(batch) for batch in found]
        for provider in providers:
            script = SCRIPT.replace('./bundle"', f'./{name}"').replace('["webgpu"]', f'["{provider}"]')
            assert script.count(name) == script.count(f'["{provider}"]') == 1
            assert page.evaluate(script)["losses"] == pytest.approx(losses, abs=1e-4), (name, provider)
