"""Frozen weights that cannot be stored as asked are refused, with what to set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from onward.engine.building.preparation import plan_run, read_training_graph
from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.plan.decision import Plan
from onward.plan.topology import Topology
from tests.frozen_models import WIDTH, build_stack, sections


def plan(path: Path, topology: Topology | None = None, **more: Any) -> Plan:
    parameters = Parameters.from_mapping(sections(path, **more))
    return plan_run(parameters, topology or Topology(), read_training_graph(parameters), {})


def test_nothing_to_store_is_refused(tmp_path: Path) -> None:
    ir.save(build_stack(), tmp_path / "m.onnx")
    everything = {"batch_size": 8, "num_train_steps": 4}
    with pytest.raises(ParametersError) as refused:
        plan(tmp_path / "m.onnx", training=everything, frozen_weights={"dtype": "int4"})
    assert str(refused.value) == (
        "frozen_weights.dtype is int4, but no layer has a frozen weight of more than 4,096 elements. Freeze layers "
        "(training.weights_not_to_train, or an adapter), or remove frozen_weights."
    )
    only_last = {**everything, "weights_to_train": ["layer*"]}
    with pytest.raises(ParametersError, match=r"none of the frozen weights can be \(table: an embedding; head: a last"):
        plan(tmp_path / "m.onnx", training=only_last, frozen_weights={"dtype": "nf4"})


@pytest.mark.parametrize(("dtype", "block_size", "found"), [("int4", WIDTH, 64), ("int8", 48, 64), ("nf4", 48, 128)])
def test_a_shard_that_ends_within_a_block_is_refused(tmp_path: Path, dtype: str, block_size: int, found: int) -> None:
    ir.save(build_stack(), tmp_path / "m.onnx")
    two = Topology(horizontal_size=2)
    frozen = {"dtype": dtype, "block_size": block_size}
    with pytest.raises(ParametersError) as refused:
        plan(tmp_path / "m.onnx", two, frozen_weights=frozen, distributed={"horizontal_parallel_size": 2})
    assert str(refused.value) == (
        f"frozen_weights.block_size is {block_size}, but with horizontal_parallel_size 2 a rank sums over {found} "
        "inputs of 'layer0.weight', which are no number of full blocks: ranks would quantize it differently. Set "
        f"frozen_weights.block_size to a divisor of {found}."
    ).replace("layer0", str(refused.value).split("'")[1].split(".")[0])
    plan(tmp_path / "m.onnx", two, frozen_weights={"dtype": dtype}, distributed={"horizontal_parallel_size": 2})
