"""Benchmarks run at a tiny size, and their tables say what was measured; what they measure is not looked at."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
from benchmarks import compare, device_profile
from benchmarks.compare_contestants import Task
from benchmarks.device_peers import DEVICE
from benchmarks.device_profile import ORT
from benchmarks.memory import _allocations, _held_by_numpy
from benchmarks.speedups import ALLOCATOR, SPEED_UPS, Measured, applies, table
from torch.profiler import ProfilerActivity, profile

from onward.models import create_model

ROOT = Path(__file__).resolve().parent.parent


def test_profiles_of_devices_are_medians_of_each_node() -> None:
    """A slow run of a node does not count, nor does what an If contains twice; the sessions of a step add up."""

    def events(**durations: list[int]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"name": "model_run", "dur": 10**6, "args": {}}]
        for name, all_runs in durations.items():
            args = {"op_name": name.partition("_")[0]}
            found += [{"name": f"{name}_kernel_time", "dur": one, "args": args} for one in all_runs]
        return found

    step = events(If_1=[9000], Conv_1=[2000, 2200, 90000], Conv_2=[1000, 1000, 1000], Relu_1=[300, 200, 100])
    times = device_profile.operator_times([step, events(Conv_1=[500])])
    assert {name: (round(one.milliseconds, 9), one.nodes) for name, one in times.items()} == {
        "Conv": (3.7, 3),
        "Relu": (0.2, 1),
    }
    text = device_profile.table(Task("mnist", "small", "cpu", False, True, 1), {DEVICE: times, ORT: {}})
    assert "| Conv | 3.70 | 3 |  |  |\n| Relu | 0.20 | 1 |  |  |" in text
    assert "| all | 3.90 | 4 |  |  |" in text


def test_a_speed_up_is_judged_round_by_round() -> None:
    """Two steps of each side in a round: 4 for 8 seconds, 2 for 3, 4 for 4."""
    found = Measured("some", [1.0, 3.0, 1.0, 1.0, 2.0, 2.0], [4.0, 4.0, 1.0, 2.0, 3.0, 1.0], 2_500_000)
    assert found.gains == [2.0, 1.5, 1.0]
    text = table(Task("llama", "tiny", "cpu", False, True, 1), [found])
    assert text.splitlines()[-1] == "| some | 1500.0 ms | 2500.0 ms | 1.500 (1.250 to 1.750) | 2.5 MB |"


def test_memory_that_numpy_has_looked_at_is_counted_once() -> None:
    """A weight is read from a file through a numpy array over torch's own memory."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watching:
        tensor = torch.empty(1000)
        tensor.numpy()
    assert watching.profiler is not None
    assert watching.profiler.kineto_results is not None
    found = {
        (address, size) for _, address, size in _allocations(watching.profiler.kineto_results.experimental_event_tree())
    }
    assert (tensor.data_ptr(), 4000) in found
    network = SimpleNamespace(net=SimpleNamespace(tensors_by_name=lambda: {"a": tensor, "b": torch.zeros(10)}))
    runner: Any = SimpleNamespace(state=SimpleNamespace(networks=[network]))
    assert _held_by_numpy(runner, {address for address, _ in found}) == 40


def test_what_a_network_has_none_of_is_not_measured(tmp_path: Path) -> None:
    """A GPT-2 has one layer for queries, keys and values, and no rotary embedding; labels that are ignored has BERT."""
    ir.save(create_model("gpt2", size="tiny", dropout=0.0), tmp_path / "model.onnx")
    task = Task("gpt2", "tiny", "cpu", False, True, 1)
    measured = [name for name, speed_up in SPEED_UPS.items() if applies(speed_up, task, tmp_path)]
    assert measured[:4] == ["all fusions", "fusion attention", "fusion gelu", "fusion cross_entropy"]
    of_all = ["cheap activations are recomputed", "products by oneDNN", ALLOCATOR, "fp32 rather than bf16"]
    assert measured[4:] == ["fusion linear", *of_all]


@pytest.mark.parametrize(("rate", "expected"), [(8e9, "25 %"), (1.9e9, "not known"), (0.0, "not known")])
def test_no_network_has_more_than_the_machine_s_rate(rate: float, expected: str) -> None:
    """4 GFLOP in two seconds; all shares of a table go when one of them is impossible."""
    ways = {
        "onward": asdict(compare.Measured(first_step=1.0, tensor_bytes=1, rounds=[2.0], losses=[1.0])),
        "eager": asdict(compare.Measured(first_step=1.0, tensor_bytes=1, rounds=[4.0], losses=[1.0])),
    }
    task = {"model": "gpt2", "size": "tiny", "bf16": False}
    size, work = {"batch": 1, "length": 8}, {"weights": 1e6, "flops": 4e9}
    text = compare.table({"task": task, "size": size, "work": work, "product_rate": rate, "ways": ways})
    shares = [line.split("|")[5].strip() for line in text.splitlines() if line.startswith(("| onward", "| written"))]
    assert shares == [expected, "12 %" if expected == "25 %" else "not known"]
    assert ("measured wrongly" in text) == (expected == "not known")


@pytest.mark.slow
def test_speed_ups_of_a_tiny_network(tmp_path: Path) -> None:
    names = ["fusion rotary_embedding", "fusion gelu", "products by oneDNN", "channels last", "freed memory is kept"]
    command = [sys.executable, "-m", "benchmarks.speedups", "llama:tiny", "--rounds", "1", "--out", str(tmp_path)]
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--only", *names], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (kept,) = tmp_path.glob("*-cpu-speedups-llama.json")
    results = json.loads(kept.read_text())["results"]["llama:tiny"]
    # A Llama has no GELU, and nothing to convolve.
    assert [found["name"] for found in results] == [name for name in names if name not in ("fusion gelu", names[3])]
    assert all(len(found["with_it"]) == len(found["without_it"]) == 2 for found in results)
    assert kept.with_suffix(".md").read_text().count("| fusion rotary_embedding |") == 1


def test_what_a_gpu_is_asked_can_be_tried_without_one(tmp_path: Path) -> None:
    """The command of docs/explanation/gpu.md, for its shortest part; an unknown part is refused with the known ones."""
    (block,) = re.findall(
        r"^```bash\n(.*?)^```", (ROOT / "docs/explanation/gpu.md").read_text(), re.MULTILINE | re.DOTALL
    )
    setting, python, script, folder = block.split()
    assert (setting, python, folder) == ("PYTHONPATH=src", "python", "results")
    command = [sys.executable, script, str(tmp_path), "--device", "cpu"]
    done = subprocess.run([*command, "environment"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "summary.txt").read_text() == done.stdout
    assert re.fullmatch(r"environment: done after \d+ of 60 s \(versions, .*\)\n", done.stdout)
    assert f"torch {metadata.version('torch')}\n" in (tmp_path / "environment" / "log.txt").read_text()
    done = subprocess.run([*command, "speed"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "speed: no such part; there are environment, tests, real, gpt2, " in done.stderr


@pytest.mark.slow
def test_a_quantized_base_is_forecast_and_trained() -> None:
    """The forecast's column, and what a run in a process of its own took."""
    command = [sys.executable, "-m", "benchmarks.quantized_base", "--size", "tiny", "--tokens", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "frozen weights" in done.stdout
    assert re.search(r"^nf4, 16 tokens: exit code 0, peak \d\.\d\d GB resident, ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_start_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.start", "--nodes", "20", "--weights", "4e7", "--folder", str(tmp_path)]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    measured = [line.split(":")[0] for line in lines if line.startswith(("inspect", "to_torch", "train", "by hand"))]
    assert measured == ["inspect, 20 nodes", "to_torch, 0.04e9 weights", "train", "train", "by hand"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_loop_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.loop", "--runs", "1", "--steps", "10"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in (
        "outside the network, computed",
        "training takes",
        "at 10,000 samples/s, waiting",
        "an asynchronous one",
    ):
        assert re.search(rf"^{name} +\d+\.\d", said, re.MULTILINE), said
