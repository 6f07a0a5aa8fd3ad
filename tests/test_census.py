"""The census of the coverage table: what is trained, how ratios are taken, what its page says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import census, census_networks, census_page

from tests.lowering.architectures import ARCHITECTURES
from tests.lowering.architectures_transformers import Made

ROOT = Path(__file__).resolve().parent.parent


def way(cpu: float, tensor_bytes: int, loss: float = 2.0) -> dict[str, Any]:
    starts = [[cpu, 2 * cpu, cpu], [cpu, cpu, cpu], [3 * cpu, cpu, cpu]]
    return {"cpu": starts, "wall": [[3 * cpu] * 3] * 3, "losses": [loss, loss], "tensor_bytes": tensor_bytes}


def row(name: str, own: float, **others: dict[str, Any]) -> dict[str, Any]:
    ways = {"onward": way(own, 50, 2.0 + 1e-3), "eager": way(0.1, 100), **others}
    return {
        "name": name, "ways": ways, "batch": 4, "weights": 1_000_000, "nodes": 7, "machine": "a machine, 1 thread",
        "load": 3.0,
    }  # fmt: skip


def test_ratios_are_medians_over_starts_of_medians_over_rounds_by_cpu_time() -> None:
    one = row("lstm", 0.05, compiled=way(0.04, 25))
    slow = row("lstm", 0.05)
    slow["ways"]["onward"]["cpu"] = [[0.05, 0.05, 0.9], [0.1, 0.1, 0.9], [0.9, 0.9, 0.9]]
    assert census_page.speeds(slow, "eager") == pytest.approx([2.0, 1.0, 1 / 9])
    assert census_page.speed(slow, "eager") == pytest.approx(1.0)
    assert census_page.seconds_of_update(slow, "onward") == 0.1
    assert census_page.speed(one, "eager") == 2.0
    assert census_page.speed(one, "compiled") == pytest.approx(0.8)
    assert (census_page.memory(one, "eager"), census_page.memory(one, "compiled")) == (0.5, 2.0)
    assert census_page.difference(one) == pytest.approx(5e-4)
    assert "eager 100.0 ms (2.00, memory 0.50)" in census.summary(one)


def test_the_page_counts_what_is_slow_and_names_what_failed() -> None:
    failed = row("gru", 0.2)
    failed["ways"]["onward"] = {"cpu": [], "wall": [], "losses": [], "failure": "NodeError: no"}
    rows = {one["name"]: one for one in (row("lstm", 0.05, compiled=way(0.04, 25)), row("xglm", 0.2), failed)}
    text = census_page.page(rows, {}, {"graph_net": "no axis"})
    assert "against eager, 2 networks: median throughput 1.25 (from 0.50 to 2.00), 1 below 1.0, 1 at or above" in text
    assert "against compiled, 1 networks: median throughput 0.80" in text
    assert "| xglm | **0.50** | not known |" in text
    assert "- gru, onward: NodeError: no\n- graph_net: left out, no axis" in text
    assert "**5e-04**" in text


def test_the_page_marks_what_auto_compiled() -> None:
    compiled = row("llama", 0.05)
    compiled["ways"]["onward"] |= {"is_compiled": True, "first_seconds": 12.34}
    text = census_page.page({"llama": compiled, "vit": row("vit", 0.2)}, {}, {})
    assert "compiled 1 of them, marked (runs are taken to be long); their first update took 12 s in the" in text
    assert "| 50.0 ms | yes | 2.00 | 2.00 to 2.00 |" in text
    assert "| 200.0 ms |  | **0.50** | 0.50 to 0.50 |" in text
    assert "compiled none" in census_page.page({"vit": row("vit", 0.2)}, {}, {})


def test_the_page_says_what_auto_left_on_networks_held_out() -> None:
    one = row("granite", 0.05, **{"onward uncompiled": way(0.05, 50), "onward compiled": way(0.2, 50)})
    text = census_page.page({"vit": row("vit", 0.2)}, {"granite": one}, {})
    assert "against eager, 1 networks: median throughput 2.00" in text
    assert "| 50.0 ms |  | 2.00 | 2.00 to 2.00 | 2.00 | **0.50** | 0.50 | **5e-04** |" in text


def test_the_page_names_what_was_not_compiled_and_what_was_not_repeated() -> None:
    one = row("llama", 0.05)
    one["ways"]["onward"] |= {"is_compiled": True, "first_seconds": 12.34, "refusals": 2, "is_repeated": False}
    one["ways"]["eager"]["is_repeated"] = False
    text = census_page.page({"llama": one}, {}, {})
    assert "networks with a segment that torch could not compile: llama" in text
    assert "not bitwise equal to those of the first: llama, onward." in text


def test_all_that_was_measured_trains_as_the_module_does() -> None:
    rows = [*census.read_rows(census.ROWS).values(), *census.read_rows(census.HELD_OUT_ROWS).values()]
    assert len(rows) > 130
    for one in rows:
        ways = one["ways"]
        allowed = census_page.FIRST_AGREEMENT.get(one["name"], census_page.AGREEMENT)
        assert ways["onward"]["losses"][0] == pytest.approx(ways["eager"]["losses"][0], rel=allowed)
    assert not [line for line in census_page.parting(rows) if "not explained" in line]
    assert not census_page.unrepeated(rows)
    assert not census_page.refused(rows)
    assert census_page.parting([row("vit", 0.2)]) == ["- `vit`: **not explained**"]


def test_rows_are_kept_in_the_order_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "census.jsonl"
    rows = {name: {"name": name} for name in ("b", "a")}
    census.write_rows(path, rows, ["a", "b", "c"])
    assert path.read_text() == '{"name": "a"}\n{"name": "b"}\n'
    assert census.read_rows(path) == rows


def test_every_architecture_is_measured_or_left_out_for_a_reason() -> None:
    names = {one.name for one in ARCHITECTURES}
    assert {*census_networks.names()} | census_networks.LEFT_OUT.keys() == names
    assert census_page.WHY.keys() <= names
    assert not names & {*census_networks.names(are_held_out=True)}


def test_networks_of_transformers_grow_and_their_heads_stay() -> None:
    made = census_networks.enlarged("llama").make
    assert isinstance(made, Made)
    assert (made.settings["hidden_size"], made.settings["num_attention_heads"]) == (128, 4)
    one = census_networks.enlarged("bert")
    tokens, mask = census_networks.draw_inputs(one, 3, 0)
    assert tokens.shape == mask.shape == (3, 63)
    assert mask.sum(1).tolist() == [63, 45, 63]
    assert census_networks.enlarged("vit").inputs[0].shape[2:] == (64, 64)
    assert census_networks.enlarged("lstm").inputs[0].shape == (2, 6, 8)


def test_only_batch_normalization_is_in_training_mode() -> None:
    module = census_networks.build(census_networks.enlarged("separable"))
    modes = {type(layer).__name__: layer.training for layer in module.modules()}
    assert modes.pop("BatchNorm2d")
    assert not any(modes.values())


@pytest.mark.parametrize(("shape", "labels"), [((4, 5), (4,)), ((4, 6, 5), (4, 6)), ((4, 5, 2, 3), (4, 2, 3))])
def test_labels_fit_the_logits(shape: tuple[int, ...], labels: tuple[int, ...]) -> None:
    one, output = census_networks.enlarged("vit"), torch.zeros(shape)
    drawn = census_networks.draw_labels(one, output, 0)
    assert drawn.shape == labels
    assert census_networks.loss_by_hand(one, output, drawn).item() == pytest.approx(torch.tensor(5.0).log().item())


@pytest.mark.slow
def test_an_architecture_is_measured_once(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "benchmarks.census", "squeezenet", "--rows", str(rows)]
    outputs = [
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
        for _ in range(2)
    ]
    assert outputs[0].stdout.startswith("squeezenet ")
    assert outputs[1].stdout == ""
    (one,) = map(json.loads, rows.read_text().splitlines())
    assert census_page.difference(one) < census_page.AGREEMENT
