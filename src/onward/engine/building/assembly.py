"""From a training graph and a plan to what one rank trains: its network or stages, its optimizer, all that changes.

The order of events is: cut, lower, distribute, and only then make the optimizer, which sees this rank's shards alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import nn

from onward.data.shard import FeatureSpec
from onward.engine.building.graph_costs import traced_costs
from onward.engine.building.pipelined import PipelinedForward, StageCompute
from onward.engine.building.preparation import make_loss_scale, watched_names
from onward.engine.building.sizes import known_dimensions
from onward.engine.gradient_reduction import GradientReduction
from onward.engine.inputs.features import FeatureReader
from onward.engine.inputs.index_ranges import FeatureRange
from onward.engine.inputs.loss_normalization import LossNormalization
from onward.engine.micro_batches import MicroBatches, PipelinedMicroBatches, SequentialMicroBatches
from onward.engine.network.compilation import Compilation
from onward.engine.network.compilation_choice import choose, joins_loss, missing_anywhere
from onward.engine.network.forward import Forward
from onward.engine.network.local_weights import local_weights
from onward.engine.network.network import LinearOptions, Network
from onward.engine.network.precision import Precision, float8_notes
from onward.engine.network.rank_shards import RankShards
from onward.engine.state import TrainState
from onward.engine.unfreezing import Unfreezing, make_unfreezing
from onward.engine.utilization import Utilization
from onward.errors import ParametersError
from onward.graph.operators import Fact, has_fact
from onward.graph.pruning.prunable_weights import prunable_weights
from onward.graph.shared_inputs import layers_that_read_the_same, note_on_joined
from onward.graph.training_graph import TrainingGraph
from onward.lowering.context import ExecutionContext
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program
from onward.optim.building import make_optimizer, with_exact_names
from onward.optimizers.registry import optimizer_named
from onward.parallel import horizontal  # noqa: F401  its operators register themselves
from onward.parallel.data_parallel import offloads, replicate
from onward.parallel.launch.process import Mesh
from onward.parallel.pipeline.pipeline import Pipeline
from onward.parallel.pipeline.stage import StageModule
from onward.parameters import Parameters
from onward.plan.costs.segments import BLOCKS_COMPILED
from onward.plan.decision import Plan
from onward.plan.experts import shared_expert_weights
from onward.plan.pipeline.schedules import SPLITS_BACKWARD, rank_of_stage
from onward.plan.pipeline.stages import Stage, StagePlan
from onward.plan.rank import PlannedStage, RankPlan, plan_rank


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """What one rank trains.

    Attributes:
        graph: of the entire network.
        plan: who does what.
        stages: of this rank's pipeline; None where there is one stage.
        networks: the weights of this rank's stages, in their segments.
        modules: what training passes call: the networks, or engines around them that reduce gradients.
        computes: what the stages compute, where there are several.
        pipeline: where there is one.
        state: all that changes.
        reduction: how gradients of several ranks become one.
        precision: of all passes.
        unfreezing: which weights are frozen at first.
        notes: for the user, one sentence each.
        notify: takes sentences for the user that come up while it trains.
    """

    graph: TrainingGraph
    plan: Plan
    stages: StagePlan | None
    networks: Sequence[Network]
    modules: Sequence[nn.Module]
    computes: Sequence[StageCompute]
    pipeline: Pipeline | None
    state: TrainState
    reduction: GradientReduction
    precision: Precision
    unfreezing: Unfreezing
    notes: tuple[str, ...]
    notify: Callable[[str], None]

    @functools.cached_property
    def utilization(self) -> Utilization:
        """Measures how well this process uses its device."""
        state, dtype = self.state, self.precision.dtype or torch.float32
        return Utilization(self.graph, state.device, dtype, state.mesh.world_size, self.notify)

    def reader(
        self, dimensions: Mapping[str, int] | None, feature_ranges: Mapping[str, FeatureRange] | None
    ) -> FeatureReader:
        """What reads the features of a batch for all stages of a pipeline."""
        assert self.stages is not None
        inputs = dict.fromkeys(name for stage in self.stages.stages for name in stage.inputs)
        graph = self.plan.context.of(self.graph)
        return FeatureReader(graph, tuple(inputs), self.state.device, dimensions, feature_ranges)

    def micro_batches(
        self,
        shares: LossNormalization,
        values: Sequence[str],
        dimensions: Mapping[str, int],
        feature_ranges: Mapping[str, FeatureRange],
        instrument: Callable[[Program], Program] | None,
        backward: Callable[[torch.Tensor], None] = torch.autograd.backward,
    ) -> MicroBatches:
        """What computes gradients; without a pipeline, `values` of the graph are given out in addition to the loss.

        The stages of a pipeline know the values that they keep from the beginning. Without one, `backward` is given
        the loss.
        """
        if self.pipeline is None:
            outputs = tuple(dict.fromkeys((*shares.names, *values)))
            arguments = (None, dimensions, feature_ranges, instrument, self.modules[0])
            forward = Forward(self.networks[0], outputs, self.precision, *arguments)
            return SequentialMicroBatches(forward, shares, self.reduction, backward)
        for compute in self.computes:
            compute.begin_round(shares.names, instrument)
        return PipelinedMicroBatches(self.pipeline, self.reader(dimensions, feature_ranges), shares)

    def evaluation(
        self, outputs: Sequence[str], feature_ranges: Mapping[str, FeatureRange], separate: OnnxModule | None = None
    ) -> Forward | PipelinedForward:
        """What computes values of a batch in evaluation, by another graph with the same weights where it is given."""
        if self.pipeline is None:
            return Forward(self.networks[0], outputs, self.precision, separate, feature_ranges=feature_ranges)
        return PipelinedForward(self.pipeline, self.reader(None, feature_ranges), outputs)


def assemble(
    parameters: Parameters,
    mesh: Mesh,
    graph: TrainingGraph,
    plan: Plan,
    notify: Callable[[str], None],
    specs: Mapping[str, FeatureSpec],
) -> Assembly:
    """Builds what a rank trains.

    Args:
        parameters: of the run.
        mesh: all processes of the run.
        graph: the network with its loss.
        plan: who does what.
        notify: takes sentences for the user that come up later.
        specs: what the data's samples have, where it is known.

    Raises:
        ModelError: the graph cannot be lowered.
        ParametersError: sizes or schedule do not fit, or the device cannot do what is asked for.
    """
    assert graph.loss_names is not None
    distributed, precision = parameters.distributed, Precision.of(parameters.mixed_precision)
    watched = watched_names(parameters.tensorboard, graph)
    dimensions = known_dimensions(parameters.training, graph, specs)
    compilation, told = _compilation(parameters, graph, mesh, notify, dimensions)
    planned = _planned(graph, plan, mesh, watched.values, compilation is not None, dimensions)
    stages, own = planned.stages, planned.own
    networks = [network_of(one, parameters, mesh, compilation=compilation) for one in own.values()]
    notes = (*plan.notes, *told, *_notes_on(networks, parameters, mesh), *pruned_axes(parameters, graph)[1])
    modules: list[nn.Module] = list(networks)
    computes: list[StageCompute] = []
    if stages is not None:
        computes = [_stage_compute(stages.stages[i], one, precision) for i, one in zip(own, networks, strict=True)]
        modules = [_stage_module(stages.stages[i], one, watched.values) for i, one in zip(own, computes, strict=True)]
    # Schedules that compute gradients of weights by themselves leave nothing for DDP to notice.
    is_wrapped = distributed.zero_stage > 0 or stages is None or plan.schedule not in SPLITS_BACKWARD
    if is_wrapped:
        sent_dtype = None if graph.quantizers else precision.dtype
        uses_all = [not parameters.training.unfreeze and _uses_all_weights(network) for network in networks]
        modules = [
            replicate(module, network.units, mesh, distributed, sent_dtype, are_all_used, _apart(network))
            for module, network, are_all_used in zip(modules, networks, uses_all, strict=True)
        ]
    pipeline = None
    if stages is not None:
        by_stage = dict(zip(own, modules, strict=True))
        pipeline = Pipeline(mesh, by_stage, stages, plan.schedule, plan.micro_batches, mesh.device)
    reduction = GradientReduction(
        mesh=mesh,
        distributed=distributed,
        partial=plan.horizontal.partial_gradients,
        experts=plan.experts.weights,
        pipeline=pipeline,
        replicas_are_wrapped=is_wrapped,
    )
    return Assembly(
        graph=graph,
        plan=plan,
        stages=stages,
        networks=networks,
        modules=modules,
        computes=computes,
        pipeline=pipeline,
        state=_train_state(parameters, mesh, graph, plan, stages, networks),
        reduction=reduction,
        precision=precision,
        unfreezing=make_unfreezing(
            parameters.training.unfreeze, graph.weights, graph.known_as, stages is None and not plan.zero_stage
        ),
        notes=notes,
        notify=notify,
    )


def _stage_compute(stage: Stage, network: Network, precision: Precision) -> StageCompute:
    return StageCompute(network, precision, network.net.graph.loss_names, [one.name for one in stage.received])


def _train_state(
    parameters: Parameters,
    mesh: Mesh,
    graph: TrainingGraph,
    plan: Plan,
    stages: StagePlan | None,
    networks: list[Network],
) -> TrainState:
    """What training changes on this rank; made after the engines have wrapped the networks' weights."""
    shapes, shardings = _shapes_of(graph), plan.horizontal.shardings
    weights = local_weights(networks, mesh, shardings, shapes, _holders(plan, stages), plan.experts)
    updated = {name: weight.parameter for name, weight in weights.items()}
    rules = with_exact_names(parameters.optimizer, graph)
    state = TrainState(
        networks=networks,
        weights=weights,
        optimizer=make_optimizer(
            rules, updated, RankShards(mesh, weights.values()), parameters.learning_rate.initial_lr
        ),
        loss_scale=make_loss_scale(parameters),
        mesh=mesh,
        replicated_slots=optimizer_named(parameters.optimizer.training_optimizer_name).replicated_slots,
        state_shardings={name: (shardings[name], shapes[name]) for name in graph.states if name in shardings},
    )
    state.keep_average(parameters.averaging)
    state.prune(parameters.pruning, pruned_axes(parameters, graph)[0])
    state.train_locally(parameters.distributed)
    return state


def pruned_axes(parameters: Parameters, graph: TrainingGraph) -> tuple[dict[str, int], tuple[str, ...]]:
    """The weights that a run prunes, each with the axis that is summed over, and notes for the user."""
    asked = parameters.pruning
    if asked.pattern is None:
        return {}, ()
    adapters = {name for adapted in graph.adapters.values() for name in adapted.names}
    weights = [name for name in graph.exported_weights if name not in adapters]
    return prunable_weights(graph.model.graph, weights, asked.weights, graph.known_as, asked.pattern == "2:4")


def _compilation(
    parameters: Parameters,
    graph: TrainingGraph,
    mesh: Mesh,
    notify: Callable[[str], None],
    dimensions: Mapping[str, int],
) -> tuple[Compilation | None, list[str]]:
    """What compiles segments, where they are to be compiled, and notes on it."""
    wanted, recorded = parameters.speed.compile, parameters.speed.cuda_graphs
    if recorded and mesh.device.type != "cuda":
        raise ParametersError(
            f"speed.cuda_graphs is true, but this run computes on a {mesh.device.type.upper()}, which has none. Leave "
            "it out, or train on a GPU."
        )
    training = parameters.training
    missing = None if wanted is False else missing_anywhere(mesh)
    choice = choose(wanted, graph, mesh.device, dimensions, training.known_steps or 0, missing, traced_costs)
    notes = [] if choice.note is None else [choice.note]
    if recorded and not choice.is_on:
        notes.append("speed.cuda_graphs: off, since what is recorded is compiled code.")
    recomputes = parameters.recompute.cheap_activations
    return (Compilation(wanted is True, notify, recorded, recomputes) if choice.is_on else None), notes


def _planned(
    graph: TrainingGraph,
    plan: Plan,
    mesh: Mesh,
    watched: Sequence[str],
    is_compiled: bool,
    dimensions: Mapping[str, int],
) -> RankPlan:
    """What this rank trains. Segments that are compiled hold several equal blocks in a run of one process only: of
    several processes, gradients are reduced when those of a segment are there.
    """
    blocks = 0
    if is_compiled:
        blocks = BLOCKS_COMPILED[mesh.device.type] if mesh.world_size == 1 else 1
    joined = is_compiled and joins_loss(graph, mesh.device, dimensions)
    return plan_rank(graph, plan, mesh.place, watched=watched, blocks_compiled=blocks, loss_is_joined=joined)


def _notes_on(networks: Sequence[Network], parameters: Parameters, mesh: Mesh) -> list[str]:
    """What the user should know of the networks of this rank."""
    distributed, precision = parameters.distributed, Precision.of(parameters.mixed_precision)
    nets = [network.net for network in networks]
    low = [len(net.graph_dtypes) for net in nets if net.graph_dtypes]
    notes = [f"{count} weights are 16-bit in the model; they are trained as fp32 master weights." for count in low]
    joining = [one.net.graph for one in networks if one.compilation is None and one.linear_layers.joins]
    notes += note_on_joined([g for one in joining for g in layers_that_read_the_same(one.model.graph, one.weights)])
    notes += float8_notes(precision, nets, mesh.device, distributed.pipeline_parallel_size == 1)
    if distributed.zero_offload_to_cpu and not offloads(distributed, mesh):
        notes.append("distributed.zero_offload_to_cpu changes nothing: this run is in host memory already.")
    return notes


def execution_context(parameters: Parameters, mesh: Mesh) -> ExecutionContext:
    """The settings that this run's operators compute with."""
    synchronizes = parameters.distributed.synchronize_batch_norm
    return ExecutionContext(
        channels_last_images=parameters.speed.channels_last,
        replica_group=mesh.data.group_name if synchronizes and mesh.data is not None else "",
        data_group="" if mesh.data is None else mesh.data.group_name,
        expert_group="" if mesh.experts is None else mesh.experts.group_name,
        horizontal_group="" if mesh.horizontal is None else mesh.horizontal.group_name,
        context_group="" if mesh.context is None else mesh.context.group_name,
        context_rank=mesh.topology.context(mesh.place),
    )


def network_of(
    planned: PlannedStage,
    parameters: Parameters,
    mesh: Mesh,
    read: Callable[[ir.Value], torch.Tensor] | None = None,
    compilation: Compilation | None = None,
) -> Network:
    """The weights of a rank, or of one of its stages, in their segments; `read` makes them instead of the file."""
    graph, is_stage = planned.graph, planned.stage is not None
    outputs = None if graph.loss_names is None or is_stage else graph.loss_names.computed
    precision = Precision.of(parameters.mixed_precision)
    net = OnnxModule(graph, outputs, read, execution_context(parameters, mesh), precision.lower)
    if read is None:
        net.to(mesh.device)
    net.keep_fp32_master_weights()
    # Schedules that compute gradients of weights later find them by a function's first result.
    is_split = is_stage and parameters.distributed.pipeline_schedule in SPLITS_BACKWARD
    layers = LinearOptions(parameters.recompute.cheap_activations, parameters.speed.join_layers and not is_split)
    # Stages may take a weight's gradients one by one, and compilers know nothing of sparse ones.
    return Network(net, planned.segments, compilation, layers, compilation is None and not is_stage)


def _apart(network: Network) -> frozenset[nn.Parameter]:
    """Weights of experts, whose gradients are not those of every replica."""
    return frozenset(network.weights[name] for name in shared_expert_weights(network.net.graph))


def _uses_all_weights(network: Network) -> bool:
    names, graph = network.net.graph.loss_names, network.net.graph.model.graph
    is_inside = names is None or not names.outputs  # a function of the user's own may leave outputs unused
    return is_inside and not any(has_fact(node.op_type, Fact.CONTROL_FLOW) for node in graph)


def _stage_module(stage: Stage, compute: StageCompute, watched: Sequence[str]) -> StageModule:
    network, names = compute.network, compute.loss
    kept = tuple(name for name in watched if name in stage.outputs)
    return StageModule(stage, network, compute, None if names is None else names.loss, kept)


def _shapes_of(graph: TrainingGraph) -> dict[str, tuple[int, ...]]:
    """Whole shapes of weights and running statistics."""
    initializers = graph.model.graph.initializers
    shapes = {}
    for name in (*graph.weights, *graph.states):
        stored = initializers[name].const_value if name in initializers else None
        if stored is not None:
            shapes[name] = tuple(int(size) for size in stored.shape.numpy())
    return shapes


def _holders(plan: Plan, stages: StagePlan | None) -> dict[str, tuple[int, ...]]:
    """Weights that several ranks of a pipeline hold -> these ranks."""
    if stages is None:
        return {}
    found = {}
    for name, held in stages.shared_weights.items():
        ranks = {rank_of_stage(plan.schedule, plan.topology.pipeline_size, stage) for stage in held}
        found[name] = tuple(sorted(ranks))
    return found
