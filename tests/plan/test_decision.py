"""The plan of a run: the same from any rank's point of view, and every node on exactly one stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx_ir as ir
import pytest

from onward.engine.building.preparation import plan_run
from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.plan.decision import graph_of_rank, stages_of_local_graph
from onward.plan.topology import Topology
from tests.invariants.cases import CASES
from tests.plan.staged_models import graph_of

SIZES = [(1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2), (4, 1, 2)]


def parameters(sizes: tuple[int, int, int], **distributed: Any) -> Parameters:
    names = ("data_parallel_size", "horizontal_parallel_size", "pipeline_parallel_size")
    return Parameters.from_mapping(
        {
            "paths": {"model_path": "gpt2.onnx"},
            "loss": dict(CASES["gpt2"].loss),
            "training": {
                "batch_size": 2,
                "num_train_steps": 4,
                "gradient_accumulation_steps": 4,
                "mapped_dimensions": {"sequence": 12},
            },
            "learning_rate": {"initial_lr": 1e-3},
            "distributed": {**dict(zip(names, sizes, strict=True)), **distributed},
        }
    )


def of_any_length(sizes: tuple[int, int, int], **distributed: Any) -> Parameters:
    asked = parameters(sizes, **distributed)
    return replace(asked, training=replace(asked.training, mapped_dimensions={}))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_weight_is_held_whole_by_the_ranks_together(sizes: tuple[int, int, int]) -> None:
    graph, topology = graph_of("gpt2"), Topology(data_size=sizes[0], horizontal_size=sizes[1], pipeline_size=sizes[2])
    plan = plan_run(parameters(sizes), topology, graph, {})
    assert plan.stage_count == sizes[2]
    whole = {name: graph.model.graph.initializers[name].shape for name in graph.weights}
    elements = dict.fromkeys(whole, 0)
    for rank in range(topology.world_size):
        place = topology.place(rank)
        if place.data:
            continue
        local = graph_of_rank(graph, plan, place)
        held = set(local.weights)
        if plan.stage_count > 1:
            stages = stages_of_local_graph(local, plan)
            held = {name for index in plan.stages_of(place) for name in stages.stages[index].weights}
        for name in held:
            shape = whole[name]
            assert shape is not None
            local_shape = local.model.graph.initializers[name].shape
            assert local_shape is not None
            sharding = plan.horizontal.shardings.get(name)
            if sharding is not None:
                expected = sharding.local_shape(shape.numpy(), place.horizontal, topology.horizontal_size)
                assert tuple(local_shape.numpy()) == tuple(expected)
            share = 1 if sharding is not None else topology.horizontal_size
            copies = 1 if plan.stage_count == 1 else len(stages.shared_weights.get(name, (0,)))
            size = 1
            for one in local_shape.numpy():
                size *= one
            elements[name] += size * 12 // share // copies
    for name, shape in whole.items():
        assert shape is not None
        size = 1
        for one in shape.numpy():
            size *= one
        assert elements[name] == 12 * size, name


def test_zero_needs_replicas() -> None:
    graph = graph_of("gpt2")
    assert plan_run(parameters((2, 1, 1), zero_stage=3), Topology(data_size=2), graph, {}).zero_stage == 3
    assert plan_run(parameters((1, 1, 1), zero_stage=3), Topology(), graph, {}).zero_stage == 0


def test_a_watched_value_must_not_make_others_travel() -> None:
    """What follows from one stage is computed there; what takes an early value to a late stage is refused."""
    graph = graph_of("mlp")
    main = graph.model.graph
    values = {str(value.name): value for node in main for value in node.outputs}
    near = ir.node("Neg", [values["fc0"]])
    far = ir.node("Add", [values["relu0"], values["logits"]])
    near.outputs[0].name, far.outputs[0].name = "near", "far"
    main.extend([near, far])
    plan = plan_run(of_any_length((1, 1, 2)), Topology(pipeline_size=2), graph, {})
    found = stages_of_local_graph(graph, plan, ("near", "fc0"))
    assert {"near", "fc0"} <= set(found.stages[0].outputs)
    assert [s.received for s in found.stages] == [s.received for s in stages_of_local_graph(graph, plan).stages]
    with pytest.raises(ParametersError, match=r"tensorboard names 'near', 'far'; to compute them, values would have"):
        stages_of_local_graph(graph, plan, ("near", "far"))


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_a_schedule_that_would_lose_gradients_is_refused(schedule: str) -> None:
    graph = graph_of("mlp")
    graph = replace(graph, weights=tuple(name for name in graph.weights if not name.startswith("fc0")))
    cuts = {"pipeline_partition_cut_list": "relu0,relu1,relu2"}
    words = rf"{schedule} .* torch loses them on stage 1: no gradient flows back .* Use Interleaved1F1B, or give"
    with pytest.raises(ParametersError, match=words):
        plan_run(of_any_length((1, 1, 2), pipeline_schedule=schedule, **cuts), Topology(pipeline_size=2), graph, {})
    interleaved = of_any_length((1, 1, 2), pipeline_schedule="Interleaved1F1B", **cuts)
    assert plan_run(interleaved, Topology(pipeline_size=2), graph, {}).stage_count == 4
