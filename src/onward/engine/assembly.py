"""From a training graph to what one rank trains: its network, its weights, its optimizer, all that changes.

The order of events is: cut, lower, distribute, and only then make the optimizer, which sees this rank's parts alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from onward.engine.exchange import GradientExchange
from onward.engine.local_weights import LocalWeight, local_weights
from onward.engine.network import Network
from onward.engine.precision import Precision
from onward.engine.preparation import make_loss_scale
from onward.engine.state import TrainState
from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import OnnxModule
from onward.lowering.passes import synchronize_statistics
from onward.optim.building import make_optimizer
from onward.parallel.data_parallel import differentiable_sum, replicate
from onward.parallel.gradients import sum_over_shards
from onward.parallel.process import Mesh
from onward.parameters import Parameters
from onward.plan.segments import plan_segments

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})


@dataclass(frozen=True)
class Assembly:
    """What one rank trains.

    Attributes:
        network: the weights of this rank in their segments.
        module: what a training pass calls: the network, or the engine around it that reduces gradients.
        state: all that changes.
        exchange: how gradients of several ranks become one.
        notes: for the user, one sentence each.
    """

    network: Network
    module: nn.Module
    state: TrainState
    exchange: GradientExchange
    notes: tuple[str, ...]


def assemble(parameters: Parameters, mesh: Mesh, graph: TrainingGraph, precision: Precision) -> Assembly:
    """Builds what a rank trains.

    Raises:
        ModelError: the graph cannot be lowered.
        ParametersError: no weight of the model trains.
    """
    assert graph.loss is not None
    if not graph.weights:
        raise ParametersError("no weight of the model trains; look at `onward inspect` and at weights_to_train.")
    notes = []
    net = OnnxModule(graph, (graph.loss,)).to(mesh.device)
    low = net.hold_masters_in_float32()
    if low:
        notes.append(f"{len(low)} weights are 16-bit in the model; they train as fp32 masters.")
    distributed = parameters.distributed
    is_cut = distributed.zero_stage > 0
    plan = plan_segments(graph.model.graph, graph.weights, is_cut, parameters.recompute)
    network = Network(net, plan)
    uses_all = not any(node.op_type in CONTROL_FLOW for node in graph.model.graph)
    module = replicate(network, list(network.segments), mesh, distributed, precision.dtype, uses_all)
    weights = local_weights([network], mesh, {}, {}, {})
    synchronize = distributed.synchronize_batch_norm and mesh.data is not None
    synchronize_statistics(differentiable_sum(mesh.data) if synchronize and mesh.data is not None else None)
    optimizer = make_optimizer(
        parameters.optimizer, {name: weight.parameter for name, weight in weights.items()}, _norm_sums(mesh, weights)
    )
    state = TrainState([network], weights, optimizer, make_loss_scale(parameters), mesh)
    return Assembly(network, module, state, GradientExchange(mesh, distributed), tuple(notes))


class _norm_sums:
    """Sums of squares over whole weights, out of those over this rank's parts."""

    def __init__(self, mesh: Mesh, weights: Mapping[str, LocalWeight]) -> None:
        self.mesh = mesh
        topology = mesh.topology
        self.copies = {
            id(weight.parameter): (1 if weight.is_cut_horizontally else topology.horizontal_size)
            * (1 if weight.is_cut_by_zero else topology.data_size)
            for weight in weights.values()
        }

    def __call__(self, parameters: Sequence[torch.Tensor], squares: torch.Tensor) -> torch.Tensor:
        copies = [self.copies[id(parameter)] for parameter in parameters]
        return sum_over_shards(self.mesh, squares, torch.tensor(copies, dtype=torch.float64, device=squares.device))
