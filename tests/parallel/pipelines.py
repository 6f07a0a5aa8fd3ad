"""Pipelines of small networks on Gloo ranks, and the same network in one process to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import OnnxModule
from onward.parallel.launch.process import Mesh, start
from onward.parallel.pipeline.pipeline import Pipeline, knows_gradients
from onward.parallel.pipeline.stage import StageModule
from onward.parameters.distributed import Distributed, PipelineSchedule
from onward.plan.pipeline.balance import balanced_stages
from onward.plan.pipeline.cut_list import stages_by_name
from onward.plan.pipeline.schedules import SPLITS_BACKWARD, stages_of_rank
from onward.plan.pipeline.stage_graph import computed, stage_graph
from onward.plan.pipeline.stages import StagePlan, plan_stages
from onward.plan.roles import find_roles
from tests.plan.staged_models import AWKWARD_STAGES, batch_of, graph_of

STAGES_PER_RANK: dict[PipelineSchedule, int] = {
    "1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2,
}  # fmt: skip
if not knows_gradients(torch.__version__):
    STAGES_PER_RANK = {name: count for name, count in STAGES_PER_RANK.items() if name not in SPLITS_BACKWARD}
PlanOf = Callable[[TrainingGraph, int], StagePlan]
Wrap = Callable[[nn.Module, Mesh], nn.Module]


@dataclass
class Outcome:
    """What an update did on one rank: losses, and gradients and running statistics by name."""

    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]


def computing(network: OnnxModule, dtype: torch.dtype | None = None) -> Any:
    """The forward pass of a network for `StageModule`, by autocast to `dtype`; a program for each choice."""
    programs: dict[tuple[str, ...], Any] = {}

    def compute(values: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, Any]:
        if names not in programs:
            programs[names] = network.program_for(names)
        program = programs[names]
        inputs = [values[name] for name in program.inputs]
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            results = program(network.training, network.device, inputs, network.tensors_by_name())
        return dict(zip(names, results, strict=True))

    return compute


def stage_module(graph: TrainingGraph, plan: StagePlan, index: int, dtype: torch.dtype | None = None) -> StageModule:
    """A stage in training mode."""
    part = stage_graph(graph, plan, index)
    network = OnnxModule(part, computed(plan.stages[index]))
    loss = graph.loss if index == len(plan) - 1 else None
    return StageModule(plan.stages[index], network, computing(network, dtype), loss).train()


def automatic_plan(graph: TrainingGraph, stage_count: int) -> StagePlan:
    return plan_stages(graph, balanced_stages(graph, stage_count), stage_count)


def awkward_plan(graph: TrainingGraph, stage_count: int) -> StagePlan:
    """`awkward` cut where it hurts; with two stages, the first two and the last two are one."""
    roles = find_roles(graph)
    named = {name: stage * stage_count // 4 for name, stage in AWKWARD_STAGES.items()}
    return plan_stages(graph, stages_by_name(graph, roles, named, stage_count), stage_count, roles)


def in_one_process(
    name: str,
    features: Sequence[Mapping[str, torch.Tensor]],
    factors: torch.Tensor,
    watched: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> Outcome:
    """The same update without a pipeline."""
    graph = graph_of(name)
    network = OnnxModule(graph, (str(graph.loss),)).train()
    compute = computing(network, dtype)
    losses = []
    for micro_batch, factor in zip(features, factors, strict=True):
        loss = compute(micro_batch, (str(graph.loss),))[str(graph.loss)]
        (loss * factor).backward()
        losses.append(loss.detach())
    gradients = {key: weight.grad for key, weight in network.weights.items() if weight.grad is not None}
    buffers = dict(network.named_buffers())
    states = {state: buffers[state].clone() for state in graph.states}
    network.eval()
    with torch.no_grad():
        values = compute(features[0], tuple(watched)) if watched else {}
    return Outcome(torch.stack(losses), gradients, states, values)


def mesh_of(pipeline: int, data: int = 1) -> Mesh:
    return start(Distributed(pipeline_parallel_size=pipeline, data_parallel_size=data), "cpu")


def make_pipeline(
    name: str,
    plan_of: PlanOf,
    schedule: PipelineSchedule,
    stage_count: int,
    micro_batches: int,
    mesh: Mesh,
    wrap: Wrap = lambda module, mesh: module,
    dtype: torch.dtype | None = None,
) -> Pipeline:
    graph = graph_of(name)
    plan = plan_of(graph, stage_count)
    assert mesh.pipeline is not None
    own = stages_of_rank(schedule, mesh.pipeline.size(), stage_count, mesh.place.pipeline)
    modules = {index: wrap(stage_module(graph, plan, index, dtype), mesh) for index in own}
    return Pipeline(mesh, modules, plan, schedule, micro_batches, mesh.device)


def in_a_pipeline(
    name: str,
    plan_of: PlanOf,
    schedule: PipelineSchedule,
    stage_count: int,
    features: Sequence[Mapping[str, torch.Tensor]],
    factors: torch.Tensor,
    watched: Sequence[str] = (),
    mesh: Mesh | None = None,
    wrap: Wrap = lambda module, mesh: module,
    dtype: torch.dtype | None = None,
) -> Outcome:
    """One update on this rank of a pipeline of all ranks."""
    mesh = mesh or mesh_of(dist.get_world_size())
    pipeline = make_pipeline(name, plan_of, schedule, stage_count, len(factors), mesh, wrap, dtype)
    modules, own = pipeline.modules, list(pipeline.modules)
    if watched:  # an evaluation in between changes nothing
        for module in modules.values():
            module.eval()
        pipeline.evaluate(features[-1], watched)
        for module in modules.values():
            module.train()
    losses = pipeline.run(features, factors)
    pipeline.sum_shared_gradients()
    gradients: dict[str, torch.Tensor] = {}
    states: dict[str, torch.Tensor] = {}
    for index in own:
        network = pipeline._stages[index].network
        for key, weight in network.weights.items():  # type: ignore[operator, union-attr]
            gradient = weight.grad
            gradients[key] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        buffers = dict(network.named_buffers())
        states |= {state: buffers[state].clone() for state in network.graph.states}  # type: ignore[union-attr]
    for module in modules.values():
        module.eval()
    values = pipeline.evaluate(features[0], watched) if watched else {}
    return Outcome(losses, gradients, states, values)


def by_every_schedule(
    name: str,
    features: Sequence[Mapping[str, torch.Tensor]],
    factors: torch.Tensor,
    watched: Sequence[str],
    data: int = 1,
    wrap: Wrap = lambda module, mesh: module,
    schedules: Sequence[PipelineSchedule] = tuple(STAGES_PER_RANK),
    plan_of: PlanOf = automatic_plan,
    dtype: torch.dtype | None = None,
) -> list[Outcome]:
    """One update under each schedule."""
    mesh = mesh_of(dist.get_world_size() // data, data)
    assert mesh.pipeline is not None
    outcomes = []
    for schedule in schedules:
        count = mesh.pipeline.size() * STAGES_PER_RANK[schedule]
        outcomes.append(in_a_pipeline(name, plan_of, schedule, count, features, factors, watched, mesh, wrap, dtype))
    return outcomes


def batches(name: str, count: int, seed: int = 1) -> list[Mapping[str, torch.Tensor]]:
    return [batch_of(name, seed + index) for index in range(count)]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))
