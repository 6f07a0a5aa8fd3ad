"""`auto` compiles on GPUs, and on CPUs what is mostly elementwise, where a run is long enough to gain by it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from onward.engine.building.graph_costs import traced_costs
from onward.engine.network import compilation_choice as module
from onward.engine.network.compilation_choice import CompilationChoice
from onward.engine.network.compilation_gain import estimate_gain
from onward.errors import ModelError, ParametersError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.models import create_model
from tests.graph.fusion.pairs import parse
from tests.mlp import save_mlp, start
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")

SPEC = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
ALWAYS = 10**9
"""Steps of a run that is never too short."""


def choose(
    wanted: Literal["auto", True, False], graph: TrainingGraph, device: torch.device, sizes: dict[str, int], steps: int
) -> CompilationChoice:
    return module.choose(wanted, graph, device, sizes, steps, module.missing_here(device), traced_costs)


@pytest.fixture
def linear_graph() -> TrainingGraph:
    options = {"size": "tiny", "width": 512, "heads": 2, "vocab_size": 64, "context_length": 16, "opset": 17}
    return make_training_graph(create_model("gpt2", **options, layers=1, dropout=0.0), loss=SPEC, fuse=True)


def test_on_a_cpu_matmuls_are_not_compiled(linear_graph: TrainingGraph) -> None:
    assert choose("auto", linear_graph, CPU, {"batch": 8, "sequence": 16}, ALWAYS).note == (
        "speed.compile: off, since on a CPU compiling gains too little; `true` turns it on."
    )
    assert choose(True, linear_graph, CPU, {}, ALWAYS) == CompilationChoice(True, None)
    assert choose(False, linear_graph, CPU, {}, ALWAYS) == CompilationChoice(False, None)


def test_without_a_compiler_of_cpp(
    linear_graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = choose("auto", linear_graph, CPU, {}, ALWAYS)
    assert not found.is_on
    assert found.note is not None
    assert found.note.startswith(
        "speed.compile: off, since no C++ compiler was found (neither 'g++' is on the PATH), which"
    )
    with pytest.raises(ParametersError, match=r"speed.compile is true, but no C\+\+ compiler was found.*apt install g"):
        choose(True, linear_graph, CPU, {}, ALWAYS)


def test_without_triton_a_gpu_runs_uncompiled(linear_graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    found = choose("auto", linear_graph, GPU, {}, ALWAYS)
    assert found.note is not None
    assert "pip install triton" in found.note
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    assert choose("auto", linear_graph, GPU, {}, ALWAYS).is_on


@pytest.fixture
def elementwise_graph() -> TrainingGraph:
    """A narrow layer, and more passes over its result than the matmul takes."""
    body = "h = MatMul(x, w)\na = Sigmoid(h)\nb = Mul(a, h)\nc = Exp(b)\nd = Add(c, h)\nlogits = Tanh(d)"
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).numpy()
    model = parse("float[n,8] x", "float[n,8] logits", body, {"w": weight})
    return make_training_graph(model, loss=SPEC, weights_to_train=["w"], fuse=True)


def test_on_a_cpu_what_passes_values_on_through_memory_is_compiled_in_a_long_run(
    elementwise_graph: TrainingGraph,
) -> None:
    found = choose("auto", elementwise_graph, CPU, {"n": 4096}, ALWAYS)
    assert found.is_on
    assert found.note is not None
    assert found.note.startswith("speed.compile: on, since it saves passes over memory that take about ")
    assert found.note.endswith(" of a step. The first step takes about 10 s longer; `false` turns it off.")


def test_on_a_cpu_batches_of_unknown_sizes_are_not_compiled(elementwise_graph: TrainingGraph) -> None:
    assert choose("auto", elementwise_graph, CPU, {}, ALWAYS).note == (
        "speed.compile: off, since on a CPU each new size of 'n' would be compiled anew; `true` turns it on."
    )


def test_on_a_cpu_a_run_that_is_too_short_is_not_compiled(elementwise_graph: TrainingGraph) -> None:
    dimensions = {"n": 4096}
    assert choose("auto", elementwise_graph, CPU, dimensions, module.FEWEST_STEPS - 1) == CompilationChoice(
        False,
        "speed.compile: off, since on a CPU compiling gains too little in a run of this length; `true` turns it on.",
    )
    assert choose("auto", elementwise_graph, CPU, dimensions, module.FEWEST_STEPS) == CompilationChoice(
        False,
        "speed.compile: off, since on a CPU it would save about 0.4 s of one core in this run, less than 5 times the "
        "10 s that compiling may take; `true` turns it on.",
    )
    # The estimate is proportional to the steps and to the batch.
    fewest = next(
        n for n in (1000 * 2**i for i in range(20)) if choose("auto", elementwise_graph, CPU, dimensions, n).is_on
    )
    assert choose("auto", elementwise_graph, CPU, {"n": 8192}, fewest // 2).is_on
    assert not choose("auto", elementwise_graph, CPU, {"n": 512}, fewest // 2).is_on


def test_on_a_cpu_a_run_must_save_five_times_what_compiling_takes(elementwise_graph: TrainingGraph) -> None:
    gain = estimate_gain(elementwise_graph, traced_costs(elementwise_graph, {"n": 4096}))
    fewest = math.ceil(5 * gain.compiling_seconds / gain.saved_seconds)
    assert choose("auto", elementwise_graph, CPU, {"n": 4096}, fewest).is_on
    assert not choose("auto", elementwise_graph, CPU, {"n": 4096}, fewest - 1).is_on


def test_on_a_cpu_convolutions_of_few_channels_are_not_compiled() -> None:
    """The same network is where its eight numbers are channels."""
    body = "h = MatMul(x, w)\nr = Unsqueeze(h, axis)\nb = Conv(r, k)\nc = Conv(b, k)\ns = Squeeze(c, axis)\n"
    body += "d = Sin(s)\ne = Exp(d)\nlogits = Add(e, s)"
    for channels, axis, note in (
        (1, 1, "speed.compile: off, since on a CPU compiling gains too little; `true` turns it on."),
        (8, 2, "speed.compile: on, since it saves passes over memory that take about"),
    ):
        stored = {
            "w": np.ones((8, 8), np.float32),
            "k": np.ones((channels, channels, 1), np.float32),
            "axis": np.asarray([axis]),
        }
        model = parse("float[n,8] x", "float[n,8] logits", body, stored)
        graph = make_training_graph(model, loss=SPEC, weights_to_train=["w"], fuse=True)
        assert str(choose("auto", graph, CPU, {"n": 4096}, ALWAYS).note).startswith(note)


def test_on_a_cpu_loops_over_an_axis_are_not_compiled() -> None:
    body = "h = MatMul(x, w)\ns = Sigmoid(h)\nrows = Unsqueeze(s, axis)\nlogits, last = RNN<hidden_size=8>(rows, u, v)"
    stored = {"w": np.ones((8, 8)), "u": np.ones((1, 8, 8)), "v": np.ones((1, 8, 8))}
    weights = {name: value.astype(np.float32) for name, value in stored.items()}
    model = parse("float[n,8] x", "float[n,1,1,8] logits", body, weights | {"axis": np.asarray([1])})
    graph = make_training_graph(model, loss=SPEC, weights_to_train=["w"], fuse=True)
    assert choose("auto", graph, CPU, {"n": 4096}, ALWAYS).note == (
        "speed.compile: off, since on a CPU each step of RNN would be compiled for itself; `true` turns it on."
    )


def test_a_gain_that_cannot_be_estimated_stops_no_run(
    elementwise_graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ModelError("a size contradicts another")

    monkeypatch.setattr(module, "estimate_gain", fail)
    found = choose("auto", elementwise_graph, CPU, {"n": 4096}, ALWAYS)
    assert not found.is_on
    assert "what compiling gains cannot be estimated from the model's shapes" in str(found.note)


def _told_on_rank(folder: Path, wanted: Literal["auto", True]) -> str:
    """On ranks the second of which has no compiler."""
    if torch.distributed.get_rank():
        module.shutil.which = lambda name: None
    distributed = {"data_parallel_size": 2}
    try:
        runner, recorder = start(folder, distributed=distributed, speed={"compile": wanted})
        runner.initialize()
    except ParametersError as error:
        return str(error)
    assert runner.state.networks[0].compilation is None
    return "\n".join(recorder.messages)


@pytest.mark.parametrize("wanted", ["auto", True])
def test_ranks_compile_where_all_machines_can(tmp_path: Path, wanted: Literal["auto", True]) -> None:
    """Ranks that do and ranks that do not would cut their networks into other segments, and wait for each other."""
    save_mlp(tmp_path)
    first, second = run_on_ranks(2, _told_on_rank, tmp_path, wanted)
    words = "on the machine of rank 1 no C++ compiler was found (neither 'g++' is on the PATH), which torch needs"
    assert f"speed.compile: off, since {words}" in first if wanted == "auto" else f"is true, but {words}" in first
    assert wanted == "auto" or f"is true, but {words}" in second


@pytest.mark.parametrize(("batch", "is_joined"), [(1, True), (128, True), (129, False), (None, False)])
def test_the_loss_of_few_logits_is_compiled_with_the_last_layer(batch: int | None, is_joined: bool) -> None:
    """GPT-2 with 256 words and sequences of 16: a sample has 16 KiB of logits."""
    options = {"size": "tiny", "width": 64, "heads": 2, "vocab_size": 256, "context_length": 16, "opset": 17}
    graph = make_training_graph(create_model("gpt2", **options, layers=1, dropout=0.0), loss=SPEC, fuse=True)
    sizes = {"sequence": 16} | ({} if batch is None else {"batch": batch})
    assert module.joins_loss(graph, CPU, sizes) is is_joined
    assert not module.joins_loss(graph, GPU, sizes)
