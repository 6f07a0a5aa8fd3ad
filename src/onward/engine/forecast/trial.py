"""A trial: one update of a run on random data, of which nothing stays but how much memory it took."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping

import torch

from onward.data.shard import FeatureSpec
from onward.engine.building.assembly import assemble
from onward.engine.building.preparation import feature_ranges, plan_run
from onward.engine.building.rounds import make_steps
from onward.engine.building.sizes import input_sizes, known_dimensions
from onward.engine.forecast.allocations import Allocations
from onward.engine.forecast.performance import synthetic_loader
from onward.engine.loop import Clock, train_steps
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import input_types
from onward.optim.schedules import LearningRateSchedule
from onward.parallel.launch.process import Mesh
from onward.parameters import Distributed, LearningRate, Parameters, TensorBoard
from onward.plan.topology import Topology


def trial_bytes(
    parameters: Parameters, mesh: Mesh, graph: TrainingGraph, specs: Mapping[str, FeatureSpec]
) -> float | None:
    """Trains one update by this rank alone; returns the bytes of its tensors at the highest moment.

    On a GPU that is what torch's allocator counts, in the code that the run will compute with. On a CPU tensors are
    counted one by one, uncompiled.

    Args:
        parameters: of the run; the rank must hold the entire network.
        mesh: of the run; nothing is communicated.
        graph: of the entire network, with its loss.
        specs: what the samples of the data have, where it is known.

    Returns:
        None where memory ran out.
    """
    alone = Mesh(topology=Topology(), rank=0, device=mesh.device)
    is_cuda = mesh.device.type == "cuda"
    training = parameters.training
    # Replicas keep their gradients in buckets all the time, as an update of several passes keeps them.
    passes = 2 if training.gradient_accumulation_steps > 1 or mesh.topology.worker_size > 1 else 1
    parameters = dataclasses.replace(
        parameters,
        distributed=Distributed(),
        tensorboard=TensorBoard(),
        speed=parameters.speed if is_cuda else dataclasses.replace(parameters.speed, compile=False),
        training=dataclasses.replace(
            training, gradient_accumulation_steps=passes, num_train_steps=passes, num_updates=None, num_epochs=None
        ),
        learning_rate=LearningRate(initial_lr=parameters.learning_rate.initial_lr),
    )
    devices = [mesh.device.index or 0] if is_cuda else []
    with torch.random.fork_rng(devices):
        try:
            return _cuda_bytes(parameters, alone, graph, specs) if is_cuda else _bytes(parameters, alone, graph, specs)
        except torch.OutOfMemoryError:
            return None
        finally:
            gc.collect()
            if is_cuda:
                torch.cuda.empty_cache()


def _cuda_bytes(parameters: Parameters, mesh: Mesh, graph: TrainingGraph, specs: Mapping[str, FeatureSpec]) -> float:
    torch.cuda.reset_peak_memory_stats(mesh.device)
    _update(parameters, mesh, graph, specs, None)
    return float(torch.cuda.max_memory_allocated(mesh.device))


def _bytes(parameters: Parameters, mesh: Mesh, graph: TrainingGraph, specs: Mapping[str, FeatureSpec]) -> float:
    log = Allocations(counts_fakes=False)
    dimensions = known_dimensions(parameters.training, graph, specs)
    dtypes, _ = input_types(graph)
    sizes = input_sizes(graph, dimensions)
    features = sum(torch.Size(sizes[name]).numel() * dtypes[name].itemsize for name in sizes)
    with log:
        _update(parameters, mesh, graph, specs, log)
        return features + sum(log.peak(0, log.now).values())


def _update(
    parameters: Parameters,
    mesh: Mesh,
    graph: TrainingGraph,
    specs: Mapping[str, FeatureSpec],
    log: Allocations | None,
) -> None:
    dimensions = known_dimensions(parameters.training, graph, specs)
    ranges = feature_ranges(parameters.loss, graph)
    assembly = assemble(
        parameters, mesh, graph, plan_run(parameters, mesh.topology, graph, specs), lambda _: None, specs
    )
    if log is not None:
        for network in assembly.networks:
            for tensor in network.net.tensors_by_name().values():
                log.note(tensor.detach())
    training = parameters.training
    steps = make_steps(parameters, assembly, dimensions, ranges)
    batches = synthetic_loader(parameters, graph, dimensions, ranges).batches(training.batch_size)
    for _ in train_steps(
        steps, batches, LearningRateSchedule(parameters.learning_rate, training.steps), training.steps, 1, Clock()
    ):
        pass
