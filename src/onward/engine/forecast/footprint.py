"""How much memory a stage needs on a rank, and what it communicates: its real program, run on tensors without memory.

Engines that shard weights run, too, among fake replicas; nothing is estimated where torch knows.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from onward.engine.building.assembly import network_of
from onward.engine.forecast.allocations import Allocations
from onward.engine.network.forward import Forward
from onward.engine.network.local_weights import local_weights
from onward.engine.network.network import Network
from onward.engine.network.precision import Precision
from onward.engine.network.rank_shards import RankShards
from onward.graph.training_graph import TrainingGraph
from onward.lowering.kernels.dtypes import TORCH_DTYPE
from onward.lowering.module import input_types
from onward.optim.building import make_optimizer, slots_by_name
from onward.optim.direct_step import take_step_of
from onward.parallel.data_parallel import local_part, micro_batch, replicate
from onward.parallel.fake_replicas import COLLECTIVES, SUMS, fake_replicas
from onward.parallel.launch.process import Mesh
from onward.parameters import Optimizer, Parameters
from onward.plan.communication import weight_elements
from onward.plan.experts import shared_expert_weights
from onward.plan.memory import StageFootprint, Traffic
from onward.plan.rank import PlannedStage
from onward.plan.topology import Place, Topology

TensorShape = tuple[tuple[int, ...], torch.dtype]
"""Sizes and element type."""


@dataclass(frozen=True)
class Measured:
    """A stage's footprint, and what it hands on.

    Attributes:
        footprint: memory and traffic.
        sent: value -> sizes and type, for the stage after.
    """

    footprint: StageFootprint
    sent: Mapping[str, TensorShape]


def measure_stage(
    planned: PlannedStage,
    parameters: Parameters,
    topology: Topology,
    place: Place,
    inputs: Mapping[str, TensorShape],
    micro_batches: int,
) -> Measured:
    """Runs the last micro-batches of an update, and the update, on tensors without memory.

    Args:
        planned: the stage on one tensor-parallel rank; its weights are not read.
        parameters: of the run; rules for the optimizer list initializers.
        topology: the mesh.
        place: of the rank.
        inputs: of the graph, of one micro-batch: what the network reads and what the stage receives.
        micro_batches: of one update.

    Raises:
        Exception: of torch, where a shape depends on data.
    """
    with _measuring(planned, parameters, topology, place, inputs) as measuring:
        return measuring.run(micro_batches)


def measure_kept(
    planned: PlannedStage,
    parameters: Parameters,
    topology: Topology,
    place: Place,
    inputs: Mapping[str, TensorShape],
) -> float:
    """Bytes of activations that a micro-batch keeps for its backward pass, of the forward pass alone.

    The arguments and errors are those of `measure_stage`.
    """
    with _measuring(planned, parameters, topology, place, inputs) as measuring:
        return measuring.kept()


@contextlib.contextmanager
def _measuring(
    planned: PlannedStage,
    parameters: Parameters,
    topology: Topology,
    place: Place,
    inputs: Mapping[str, TensorShape],
) -> Iterator[_Measuring]:
    """A stage of which nothing has run yet."""
    zero = parameters.distributed.zero_stage if topology.worker_size > 1 else 0
    mode, log = FakeTensorMode(allow_non_fake_inputs=True), Allocations()
    fake = fake_replicas(topology if zero else Topology(), place if zero else Place(0, 0, 0))
    with fake as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # engines warn of what a run would do, which a forecast does not
        network = network_of(planned, parameters, mesh, read=functools.partial(_empty_weight, mode))
        network.train()
        network.net.train()
        yield _Measuring(planned, parameters, topology, mesh, mode, log, network, inputs)


def _empty_weight(mode: FakeTensorMode, value: ir.Value) -> torch.Tensor:
    stored = value.const_value
    assert stored is not None
    with mode:
        return torch.empty(tuple(int(size) for size in stored.shape.numpy()), dtype=TORCH_DTYPE[stored.dtype])


def optimizer_slots(settings: Optimizer, graph: TrainingGraph) -> float:
    """Bytes of state for a byte of fp32 weights, of the optimizer itself on tensors without memory.

    Args:
        settings: section `optimizer`, with the exact names of weights (`with_exact_names`).
        graph: with the trained weights.
    """
    stored = {name: graph.model.graph.initializers[name].const_value for name in weight_elements(graph)}
    with FakeTensorMode():
        weights = {
            name: torch.nn.Parameter(torch.empty(tuple(tensor.shape.numpy())))
            for name, tensor in stored.items()
            if tensor is not None
        }
        found = slots_by_name(make_optimizer(settings, weights), weights).values()
    state = sum(tensor.nbytes for slots in found for tensor in slots.values())
    return state / max(1, sum(weight.nbytes for weight in weights.values()))


class _Measuring:
    """One stage's run."""

    def __init__(
        self,
        planned: PlannedStage,
        parameters: Parameters,
        topology: Topology,
        mesh: Mesh,
        mode: FakeTensorMode,
        log: Allocations,
        network: Network,
        inputs: Mapping[str, TensorShape],
    ) -> None:
        graph, stage = planned.graph, planned.stage
        self.stage, self.parameters, self.topology = stage, parameters, topology
        self.mesh, self.mode, self.log, self.network, self.inputs = mesh, mode, log, network, inputs
        distributed = parameters.distributed
        self.zero = distributed.zero_stage if topology.worker_size > 1 else 0
        self.is_bucketed = topology.worker_size > 1 and not self.zero and not distributed.enable_adasum
        precision = Precision.of(parameters.mixed_precision)
        self.precision = precision
        self.loss = None if graph.loss_names is None else graph.loss_names.loss
        relayed = set() if stage is None else set(stage.relayed)
        self.sent = [] if stage is None else [t for t in stage.sent if t.name not in relayed]
        self.outputs = (self.loss,) if self.loss is not None else tuple(t.name for t in self.sent)
        self.module: torch.nn.Module = network
        if self.zero:
            sent_dtype = None if graph.quantizers else precision.dtype
            with mode:
                apart = {network.weights[name] for name in shared_expert_weights(graph)}
                self.module = replicate(network, network.units, mesh, distributed, sent_dtype, True, apart)
        self.forward = Forward(network, self.outputs, precision, module=self.module, note_cast=self._note_cast)
        self.given = {name: inputs[name] for name in self.forward.program.inputs}

    def _note_cast(self, weight: torch.Tensor, lowered: torch.Tensor) -> None:
        if lowered is not weight:
            self.log.name([lowered], "low-precision copies")

    def run(self, micro_batches: int) -> Measured:
        """Two or three micro-batches where there are several, and an update."""
        self._specialize()
        with self.mode, self.log:
            optimizer = self._hold()
            first = self._pass(is_last=False)[1] if micro_batches > 1 else ()
            # ZeRO gathers with the first micro-batch what others find there; without it all are alike.
            between = self._pass(is_last=False)[1] if micro_batches > 2 and self.zero else first
            held = self.log.now
            in_backward = self.parameters.speed.update_in_backward
            with self._updating(optimizer) if in_backward else contextlib.nullcontext():
                moments, last, sent = self._pass(is_last=True)
            update = self._update(optimizer)
        log = self.log
        footprint = StageFootprint(
            held=log.alive(held),
            kept=log.alive(moments[0]),
            forward_peak=log.peak(held, moments[0]),
            backward_peak=log.peak(moments[0], moments[1]),
            update_peak=log.peak(moments[1], update),
            received=self._received(),
            sent=self._sizes(sent),
            features=self._features(),
            traffic_first=self._traffic(first),
            traffic_between=self._traffic(between) if micro_batches > 2 else (),
            traffic_last=self._traffic(last),
        )
        return Measured(footprint, sent)

    def kept(self) -> float:
        """Bytes of activations after a forward pass that were not there before."""
        self._specialize()
        with self.mode, self.log as log:
            self._hold_network()
            held = log.now
            passed = self._forward()
            log.name_alive("activations")
            kept = log.alive(log.now)
            del passed  # what it kept goes with it
        return kept.get("activations", 0.0) - log.alive(held).get("activations", 0.0)

    def _specialize(self) -> None:
        """Shapes become numbers on real tensors: constants are, and programs are kept for the shapes they are for."""
        examples = {name: torch.empty((), dtype=d).expand(shape) for name, (shape, d) in self.given.items()}
        self.forward.specialize([examples[name] for name in self.forward.program.inputs])

    def _hold_network(self) -> None:
        """Weights and constants, which are there all the time."""
        log, network = self.log, self.network
        for weight in network.parameters():
            log.note(local_part(weight.detach()), "weights")
        for tensor in self.forward.frozen:
            log.note(tensor, "frozen weights")
        for tensor in self.forward.constants:
            log.note(tensor, "constants")

    def _hold(self) -> torch.optim.Optimizer:
        """What is there all the time."""
        log, network, distributed = self.log, self.network, self.parameters.distributed
        self._hold_network()
        shapes = {name: tuple(weight.shape) for name, weight in network.weights.items()}
        self.weights = local_weights([network], self.mesh, {}, shapes, {})
        updated = {name: weight.parameter for name, weight in self.weights.items()}
        optimizer = make_optimizer(self.parameters.optimizer, updated, RankShards(self.mesh, self.weights.values()))
        for slots in slots_by_name(optimizer, updated).values():
            for tensor in slots.values():
                log.note(tensor, "moments")
        if self.parameters.pruning.pattern is not None:
            patterns, known_as = self.parameters.pruning.weights or ("*",), network.net.graph.known_as
            pruned = [one for name, one in updated.items() if one.dim() > 1 and known_as.matches(name, patterns)]
            self.masks = [torch.empty_like(one, dtype=torch.bool) for one in pruned]
            log.name(self.masks, "masks")
        if self.parameters.averaging.kind is not None:
            self.averages = [torch.empty_like(parameter) for parameter in updated.values()]
            log.name(self.averages, "averages")
        self.outer = [torch.empty_like(one) for one in updated.values() for _ in range(distributed.outer_tensors)]
        log.name(self.outer, "outer optimizer")
        if self.is_bucketed:  # DDP's gradients are views of its buckets, which stay
            for weight in network.parameters():
                weight.grad = torch.zeros_like(weight)
                log.note(weight.grad, "gradients")
        return optimizer

    def _pass(self, is_last: bool) -> tuple[tuple[int, int], tuple[tuple[str, int, int], ...], dict[str, TensorShape]]:
        """One micro-batch: points in the log after forward and backward pass, its collectives, and what is sent."""
        log = self.log
        log.forget_counts()
        with micro_batch(self.module, self.zero, is_last):
            features, outputs = self._forward()
            if self.loss is not None:
                roots = [outputs[self.loss].float()]
            else:
                roots = [outputs[t.name] for t in self.sent if t.with_gradient]
            sent = {t.name: (tuple(outputs[t.name].shape), outputs[t.name].dtype) for t in self.sent}
            log.name_alive("activations")
            forward = log.now
            if self.loss is None:
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
            else:
                torch.autograd.backward(roots)
        del outputs, roots, features
        for weight in self.network.parameters():
            if weight.grad is not None:
                log.name([weight.grad], "gradients")
        # ZeRO 1 adds up full gradients out of sight; nothing else outlives both passes.
        log.rename_alive("activations", "gradients")
        counts = tuple((name, log.collectives[name], log.collective_bytes[name]) for name in log.collectives)
        return (forward, log.now), counts, sent

    def _forward(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The inputs and the outputs of a forward pass."""
        received = {} if self.stage is None else {t.name: t.with_gradient for t in self.stage.received}
        features = {}
        for name, (shape, dtype) in self.given.items():
            wanted = received.get(name, False) and dtype.is_floating_point
            features[name] = torch.empty(shape, dtype=dtype).requires_grad_(wanted)
        self.log.name(features.values(), "activations")
        return features, self.forward(features)

    @contextlib.contextmanager
    def _updating(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """As `onward.engine.update_in_backward`, which is for one process."""
        groups = {weight: group for group in optimizer.param_groups for weight in group["params"]}

        def update(weight: torch.Tensor) -> None:
            assert weight.grad is not None
            self.log.name([weight.grad], "gradients")
            with contextlib.suppress(DataDependentOutputException):
                take_step_of(optimizer, groups[weight], weight)
            weight.grad = None

        with contextlib.ExitStack() as hooks:
            for weight in groups:
                hooks.callback(weight.register_post_accumulate_grad_hook(update).remove)
            yield

    def _update(self, optimizer: torch.optim.Optimizer) -> int:
        for weight in self.weights.values():
            weight.take_gradient()
        with contextlib.suppress(DataDependentOutputException):  # of a number that some keep on the host
            optimizer.step()
        return self.log.now

    def _received(self) -> tuple[float, float]:
        if self.stage is None:
            return 0.0, 0.0
        sizes = {t.name: _bytes_of(self.inputs[t.name]) for t in self.stage.received}
        return sum(sizes.values()), sum(sizes[t.name] for t in self.stage.received if t.with_gradient)

    def _sizes(self, sent: Mapping[str, TensorShape]) -> tuple[float, float]:
        """Relayed values travel on, too."""
        if self.stage is None:
            return 0.0, 0.0
        sizes = {t.name: _bytes_of(sent[t.name] if t.name in sent else self.inputs[t.name]) for t in self.stage.sent}
        return sum(sizes.values()), sum(sizes[t.name] for t in self.stage.sent if t.with_gradient)

    def _features(self) -> float:
        received = set() if self.stage is None else {t.name for t in self.stage.received}
        return sum(_bytes_of(shape) for name, shape in self.given.items() if name not in received)

    def _traffic(self, counts: tuple[tuple[str, int, int], ...]) -> tuple[Traffic, ...]:
        found = []
        sizes = {
            "horizontal": self.topology.horizontal_size,
            "context": self.topology.context_size,
            "expert": self.parameters.distributed.expert_parallel_size,
        }
        for name, calls, payload in counts:
            what, ranks = COLLECTIVES[name], self.topology.zero_size
            if name.startswith("onward."):
                ranks = sizes[name.removeprefix("onward.").split("_")[0]]
            elif name == "c10d.allreduce_":
                what, ranks = self._over_replicas()
            both_ways = 2.0 if "reduce" in name and "scatter" not in name else 1.0
            found.append(
                Traffic(
                    what=what,
                    calls=calls,
                    payload=payload,
                    ranks=ranks,
                    share=both_ways * (ranks - 1) / ranks,
                )
            )
        return tuple(found)

    def _over_replicas(self) -> tuple[str, int]:
        """What all-reduces are about, and over how many ranks: under ZeRO in groups, gradients over the groups."""
        groups = self.topology.worker_size // self.topology.zero_size
        return ("gradients over the groups of ZeRO", groups) if groups > 1 else (SUMS, self.topology.worker_size)


def _bytes_of(shape: TensorShape) -> float:
    sizes, dtype = shape
    return float(torch.Size(sizes).numel() * dtype.itemsize)


def input_shapes_of(graph: TrainingGraph, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorShape]:
    """Sizes and types of a graph's inputs for one micro-batch; `sizes` of each are known."""
    dtypes, _ = input_types(graph)
    return {name: (sizes[name], dtype) for name, dtype in dtypes.items() if name in sizes}


def stage_inputs(
    graph: TrainingGraph, inputs: Mapping[str, TensorShape], arrived: Mapping[str, TensorShape]
) -> dict[str, TensorShape]:
    """Of the inputs of a stage's graph, those of the network and those that earlier stages send."""
    known: dict[str, Any] = {**inputs, **arrived}
    return {str(value.name): known[str(value.name)] for value in graph.model.graph.inputs if value.name in known}
