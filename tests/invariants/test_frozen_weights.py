"""Quantized frozen weights in every layout: replicas, tensor-parallel ranks and stages quantize to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from onward.engine.building.preparation import plan_run, read_training_graph
from onward.parameters import Parameters
from onward.plan.topology import Topology
from tests.frozen_models import ADAPTED, QUANTIZED, STACK, build_quantized
from tests.frozen_models import sections as stack_sections
from tests.invariants.layouts import Layout, assert_follows, train

ADAPTER = {"rank": 4, "alpha": 8.0, "targets": ["layer*"]}
TWO_STAGES = Layout(pipeline=2, distributed={"pipeline_partition_cut_list": "relu1"})


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (Layout(data=2), "nf4"),
        (Layout(horizontal=2), "int4"),
        (TWO_STAGES, "nf4"),
        pytest.param(Layout(data=2, distributed={"zero_stage": 3}), "nf4", marks=pytest.mark.slow),
        pytest.param(Layout(horizontal=2), "int8", marks=pytest.mark.slow),
        pytest.param(TWO_STAGES, "bf16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layouts_follow_one_process(layout: Layout, dtype: str) -> None:
    sections: dict[str, Any] = {"frozen_weights": {"dtype": dtype}}
    alone = train(STACK, Layout(), sections=sections, accumulation=2, updates=4)
    found = train(STACK, layout, sections=sections, accumulation=2, updates=4)
    assert_follows(found, alone, of_losses=1e-5, of_weights=1e-5)


@pytest.mark.parametrize(
    ("base", "layout"),
    [
        ("in memory", Layout(horizontal=2)),
        ("in the file", TWO_STAGES),
        ("in the file", Layout(horizontal=2)),
        pytest.param("in memory", TWO_STAGES, marks=pytest.mark.slow),
        pytest.param("in the file", Layout(data=2), marks=pytest.mark.slow),
        pytest.param("in the file", Layout(data=2, distributed={"zero_stage": 2}), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_of_a_quantized_base_follow_one_process(base: str, layout: Layout) -> None:
    sections: dict[str, Any] = {"adapter": ADAPTER}
    if base == "in memory":
        sections["frozen_weights"] = {"dtype": "nf4"}
    case = ADAPTED if base == "in memory" else QUANTIZED
    alone = train(case, Layout(), sections=sections, accumulation=2, updates=4)
    found = train(case, layout, sections=sections, accumulation=2, updates=4)
    assert_follows(found, alone, of_losses=1e-5, of_weights=1e-5)


@pytest.mark.parametrize("name", ["4 bits", "8 bits"])
def test_packed_weights_of_a_file_are_sharded_by_tensor_parallelism(name: str, tmp_path: Path) -> None:
    """Rows of the first layer of a pair, columns of the second: with their scales and zero points."""
    ir.save(build_quantized(name), tmp_path / "q.onnx")
    adapted: dict[str, Any] = {"adapter": ADAPTER, "distributed": {"horizontal_parallel_size": 2}}
    raw = stack_sections(tmp_path / "q.onnx", **adapted)
    raw["training"] |= {"weights_to_train": []}
    parameters = Parameters.from_mapping(raw)
    plan = plan_run(parameters, Topology(horizontal_size=2), read_training_graph(parameters), {})
    stored = [one for one in plan.horizontal.shardings if ".lora_" not in one and ".bias" not in one]
    assert len(stored) == (12 if name == "4 bits" else 8)
    assert {plan.horizontal.shardings[one].axis for one in stored if one.startswith("layer1")} == {1}
