"""CUDA graphs: what is recorded, what is refused; that losses are the same is proven where there is a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import list_mode_options

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.network.compilation import Compilation, options_for
from onward.environment import Environment
from onward.errors import ParametersError
from onward.runner import TrainingRunner
from tests.engine.network.test_compilation import gpt2, make_forward, refuse, step, tokens
from tests.mlp import ON_ONE_THREAD, data, parameters, save_mlp
from tests.watching import Recorder

STEPS = {"batch_size": 4, "num_train_steps": 6, "display_loss_steps": 1}


def test_only_training_passes_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    are_recorded: list[bool] = []

    def options_for(device: torch.device, is_recorded: bool = False) -> dict[str, Any]:
        are_recorded.append(is_recorded)
        return {}

    monkeypatch.setattr("onward.engine.network.compilation.options_for", options_for)
    monkeypatch.setattr(torch, "compile", lambda code, **_: code)
    forward = make_forward(gpt2(1), Compilation(True, refuse, cuda_graphs=True))
    step(forward, tokens())
    assert set(are_recorded) == {True}
    are_recorded.clear()
    forward.network.eval()
    with torch.no_grad():
        forward(tokens())
    assert set(are_recorded) == {False}
    are_recorded.clear()
    step(make_forward(gpt2(1), Compilation(True, refuse)), tokens())
    assert set(are_recorded) == {False}


def test_recorded_passes_have_the_options_of_torchs_own_mode() -> None:
    gpu = torch.device("cuda")
    plain, recorded = options_for(gpu), options_for(gpu, is_recorded=True)
    assert {key: recorded[key] for key in recorded.keys() - plain.keys()} == list_mode_options("reduce-overhead")


@pytest.mark.parametrize("recorded", [True, False])
def test_every_pass_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    """What replays a graph has to know that nothing of the pass before is needed."""
    announced: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda code, **_: code)
    monkeypatch.setattr("onward.engine.network.compilation_choice.missing_here", lambda _: None)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: announced.append(1))
    save_mlp(tmp_path)
    asked = parameters(tmp_path, training=STEPS, speed={"compile": True})
    runner = TrainingRunner(asked, ON_ONE_THREAD)
    runner.initialize()
    compilation = runner.state.networks[0].compilation
    assert compilation is not None
    compilation.cuda_graphs = recorded
    runner.run(InMemoryDataLoader(data(24)))
    assert len(announced) == (6 if recorded else 0)


def test_a_cpu_has_none(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    with pytest.raises(ParametersError) as caught:
        TrainingRunner(parameters(tmp_path, speed={"cuda_graphs": True}), ON_ONE_THREAD).initialize()
    assert str(caught.value) == (
        "speed.cuda_graphs is true, but this run computes on a CPU, which has none. Leave it out, or train on a GPU."
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mixed", [{}, {"use_mixed_precision": True, "use_bfloat16": True}], ids=["fp32", "bf16"])
def test_replayed_passes_train_as_those_that_are_called(tmp_path: Path, mixed: dict[str, bool]) -> None:
    save_mlp(tmp_path)
    found = []
    for recorded in (False, True):
        recorder = Recorder()
        sections = {"speed": {"compile": True, "cuda_graphs": recorded}, "mixed_precision": mixed}
        runner = TrainingRunner(
            parameters(tmp_path, training=STEPS, **sections), Environment(execution_provider="CUDA"), [recorder]
        )
        runner.initialize()
        loader = InMemoryDataLoader(data(24))
        runner.run(loader, loader)
        found.append(recorder.losses)
    assert found[1] == pytest.approx(found[0], rel=1e-6)
