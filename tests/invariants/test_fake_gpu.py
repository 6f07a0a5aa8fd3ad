"""What a GPU would see of runs and operators, on a machine without one: no mixed devices, no waiting, the same numbers.

The GPU is fake (`tests/fake_gpu`): torch's autograd engine, autocast and optimizers take its tensors for ones
on a GPU, and their numbers are computed on the CPU. It says nothing of kernels, streams, memory or speed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.fake_gpu.processes import COMPILER, ask, compile_hooks

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch has hooks of its own"),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C++ compiler"),
]

NUMBER = "aten._local_scalar_dense.default at engine/"
REPORT = (
    NUMBER + "gradient_reduction.py:mean_over_replicas",
    NUMBER + "state.py:count_skipped",
    NUMBER + "steps.py:gradient_norm",
)
"""Where a report reads its numbers."""

ALWAYS = {REPORT[0]: 2, REPORT[2]: 2, NUMBER + "steps.py:_update_if_finite": 7}
"""The norm decides on every update: on the next loss scale, or since LAMB asks."""

EXPECTED = {
    "GPT-2, fp16": ALWAYS,
    "BERT, LAMB": ALWAYS,
    "GPT-2, recomputed and resumed": {
        **dict.fromkeys(REPORT, 1),
        "copy to the host at checkpoint/staging.py:take": 112,
        "synchronize at checkpoint/staging.py:take": 1,
    },
}
"""For what the host waits after the first report, if not for two reports."""

READS_BY_DESIGN = {
    "lowering/kernels/host.py:to_host": "sizes, axes or repetitions that are an input of the graph, not a constant",
    "lowering/kernels/host.py:to_tensor": "shape arithmetic returned as a tensor; computed once for inputs of a shape",
    "lowering/ops/indexing.py:compress": "as many results as the condition is true",
    "lowering/ops/indexing.py:non_zero": "as many results as there are numbers other than 0",
    "lowering/ops/sorting.py:unique": "as many results as there are different numbers",
    "lowering/ops/vision.py:non_max_suppression": "as many results as shards are kept",
    "lowering/ops/text.py:tf_idf_vectorizer": "the n-grams to be counted are attributes",
    "lowering/ops/signal.py:mel_weight_matrix": "the matrix is computed on the host",
}
"""Functions that wait for the GPU in cases of the standard -> why."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hooks.cpp`, compiled."""
    return compile_hooks(tmp_path_factory.mktemp("gpu"))


def test_runs_have_the_numbers_of_a_cpu_and_wait_for_reports_only(library: Path, tmp_path: Path) -> None:
    """Losses, norms and metrics: to rounding in fp32, in 16 or 8 bits to 0.1 % (norms: 3 %).

    From the first report on; before, masks are looked at once.
    """
    found = ask(library, tmp_path, "runs")
    assert len(found) == 8
    for name, run in found.items():
        cpu, gpu = run["CPU"], run["CUDA"]
        assert gpu["on_gpu"], name
        is_exact = not any(kind in name for kind in ("bf16", "fp16", "float8"))
        bound = 1e-5 if is_exact else 1e-3
        assert gpu["losses"] == pytest.approx(cpu["losses"], rel=bound), name
        assert gpu["norms"] == pytest.approx(cpu["norms"], rel=bound if is_exact else 3e-2), name
        assert gpu["metrics"]["loss"] == pytest.approx(cpu["metrics"]["loss"], rel=bound), name
        assert gpu["waits"] == EXPECTED.get(name, dict.fromkeys(REPORT, 2)), name
    assert found["GPT-2, recomputed and resumed"]["CUDA"]["resumed"] == 4
    used = {name: set(run["operators"]) for name, run in found.items()}
    assert "aten._fused_adamw_.default" in used["GPT-2, AdamW, clipping"]
    assert "aten._safe_softmax.default" in used["GPT-2, AdamW, clipping"]  # of attention, which is one call
    assert "aten._scaled_mm.default" in used["GPT-2, float8"]
    assert "aten._thnn_fused_lstm_cell.default" in used["LSTM, AdamW"]


@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.slow) for share in (1, 2, 3))])
def test_operators_keep_to_one_device(library: Path, tmp_path: Path, share: int) -> None:
    """The standard's own node cases give the standard's results there, and wait only where they must."""
    found = ask(library, tmp_path, "standard", str(share), "4")
    assert found["count"] > 300
    assert not found["failed"], "\n".join(f"{name}: {why}" for name, why in found["failed"].items())
    places = {wait.split(" at ")[1]: cases for wait, cases in found["waits"].items()}
    unknown = {place: cases for place, cases in places.items() if place not in READS_BY_DESIGN}
    assert not unknown, f"waits for the GPU that have no reason: {unknown}"
