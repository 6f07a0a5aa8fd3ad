"""The bubble of every pipeline schedule, measured: `python -m benchmarks.pipeline_bubble [--ranks 4] [--real]`.

Each stage sleeps instead of computing: so long forward, so long for gradients of activations, so long for those of
weights. What is left is what the schedules themselves cost, on any machine: waiting, and the exchange over Gloo. Next
to it stand the simulation of `onward plan` and the papers' formula. With `--real` the stages are those of a GPT-2, each
timed apart; that needs a core for each rank.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch._C._distributed_c10d import FileStore

from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.parallel.launch.process import start
from onward.parallel.pipeline.pipeline import Pipeline
from onward.parallel.pipeline.stage import StageModule
from onward.parameters.distributed import Distributed, PipelineSchedule
from onward.plan.costs.stage_cost import StageCost
from onward.plan.pipeline.balance import balanced_stages
from onward.plan.pipeline.schedules import ideal_bubble_share, simulate, stages_of_rank
from onward.plan.pipeline.stage_graph import computed, stage_graph
from onward.plan.pipeline.stages import plan_stages

STAGES_PER_RANK: dict[PipelineSchedule, int] = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}


class _SleepBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


def sleeping(network: OnnxModule, seconds: float, features: tuple[str, ...]) -> Any:
    """A stage's forward pass that only sleeps; its backward pass sleeps once for activations and once for weights."""
    weight = next(iter(network.weights.values()))

    def compute(values: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, Any]:
        time.sleep(seconds)
        source = next((value for name, value in values.items() if name not in features), None)
        value = values["x"].clone() if source is None else _SleepBackward.apply(source, seconds)
        # The first stage has no gradient of an activation to compute; it sleeps for it with its weights'.
        total = seconds if source is not None else 2 * seconds
        value = value + 0.0 * _SleepBackward.apply(weight, total).mean()
        return {name: value.mean() if name == "loss" else value for name in names}

    return compute


def computing(network: OnnxModule) -> Any:
    """A stage's real forward pass."""
    programs: dict[tuple[str, ...], Any] = {}

    def compute(values: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, Any]:
        if names not in programs:
            programs[names] = network.program_for(names)
        inputs = [values[name] for name in programs[names].inputs]
        found = programs[names](network.training, network.device, inputs, network.tensors_by_name())
        return dict(zip(names, found, strict=True))

    return compute


def chain(layers: int) -> TrainingGraph:
    """As many linear layers as there are stages."""
    x = ir.Value(name="x", shape=ir.Shape(["batch", 8]), type=ir.TensorType(ir.DataType.FLOAT))
    value, nodes, weights = x, [], []
    for index in range(layers):
        tensor = ir.Tensor(torch.randn(8, 8).numpy(), name=f"w{index}")
        weight = ir.Value(name=f"w{index}", shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        output = ir.Value(name=f"h{index}", shape=x.shape, type=x.type)
        nodes.append(ir.Node("", "MatMul", [value, weight], outputs=[output], name=f"layer{index}"))
        weights.append(weight)
        value = output
    graph = ir.Graph([x], [value], nodes=nodes, initializers=weights, opset_imports={"": 18}, name="chain")
    loss = LossSpec(type="mean_squared_error", prediction=str(value.name), label="y")
    return make_training_graph(ir.Model(graph, ir_version=10), loss=loss)


def gpt2() -> TrainingGraph:
    """Eight layers, so that two stages a rank have one each."""
    model = create_model(
        "gpt2", layers=8, heads=4, width=128, vocab_size=512, context_length=128, dropout=0.0, size="tiny"
    )
    loss = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    return make_training_graph(model, loss=loss)


def batch(real: bool) -> dict[str, torch.Tensor]:
    """Features of a micro-batch."""
    if not real:
        return {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    tokens = torch.randint(0, 512, (4, 128))
    return {"input_ids": tokens, "labels": tokens}


def time_updates(pipeline: Pipeline, real: bool, updates: int) -> float:
    """Seconds of an update, the median of several after a first one."""
    features = [batch(real) for _ in range(pipeline.micro_batches)]
    factors = torch.full((pipeline.micro_batches,), 1.0 / pipeline.micro_batches)
    taken = []
    for _ in range(updates + 1):
        dist.barrier()
        began = time.perf_counter()
        pipeline.run(features, factors)
        dist.barrier()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def measure_stage(module: StageModule, real: bool) -> StageCost:
    """What a stage of a real network takes alone: forward, then the backward pass, split evenly."""
    forwards, backwards = [], []
    for _ in range(4):
        received = [torch.randn(4, 128, 128, requires_grad=True) for _ in module.stage.received]
        module.feed([batch(real)])
        began = time.perf_counter()
        result = module(*received, microbatch=0)
        middle = time.perf_counter()
        result = result if isinstance(result, tuple) else (result,)
        torch.autograd.backward(
            [value for value in result if value.requires_grad], [torch.ones_like(v) for v in result]
        )
        forwards.append(middle - began)
        backwards.append(time.perf_counter() - middle)
    module.zero_grad()
    module.feed(())
    half = statistics.median(backwards[1:]) / 2
    return StageCost(statistics.median(forwards[1:]), half, half)


def on_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Measures every schedule; rank 0 prints the table."""
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    mesh = start(Distributed(pipeline_parallel_size=arguments.ranks), "cpu")
    if rank == 0:
        print(f"{arguments.ranks} ranks, {arguments.micro_batches} micro-batches")
        print(f"{'schedule':<22} {'stages':>6} {'update':>9} {'bubble':>8} {'simulated':>10} {'formula':>8}")
    for schedule, per_rank in STAGES_PER_RANK.items():
        count = arguments.ranks * per_rank
        graph = gpt2() if arguments.real else chain(count)
        plan = plan_stages(graph, balanced_stages(graph, count), count)
        modules = {}
        for index in stages_of_rank(schedule, arguments.ranks, count, rank):
            network = OnnxModule(stage_graph(graph, plan, index), computed(plan.stages[index]))
            seconds = arguments.milliseconds / 1000 / per_rank
            compute = computing(network) if arguments.real else sleeping(network, seconds, ("x", "y"))
            loss = graph.loss if index == count - 1 else None
            modules[index] = StageModule(plan.stages[index], network, compute, loss).train()
        costs = [StageCost(seconds, seconds, seconds)] * count
        if arguments.real:
            own = {index: measure_stage(module, True) for index, module in modules.items()}
            gathered: list[Any] = [None] * arguments.ranks
            dist.all_gather_object(gathered, own)
            every = {index: cost for part in gathered for index, cost in part.items()}
            costs = [every[index] for index in range(count)]
        pipeline = Pipeline(mesh, modules, plan, schedule, arguments.micro_batches, mesh.device)
        taken = time_updates(pipeline, arguments.real, arguments.updates)
        busy = arguments.micro_batches * sum(c.forward + c.backward_input + c.backward_weight for c in costs)
        simulated = simulate(schedule, arguments.ranks, arguments.micro_batches, costs).bubble_share
        ideal = ideal_bubble_share(schedule, arguments.ranks, arguments.micro_batches, per_rank)
        if rank == 0:
            formula = "" if ideal is None else f"{ideal:.1%}"
            bubble = 1 - busy / (arguments.ranks * taken)
            print(
                f"{schedule:<22} {count:>6} {taken:>7.3f} s {bubble:>8.1%} {simulated:>10.1%} {formula:>8}", flush=True
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a rank's forward pass of a micro-batch")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="stages of a GPT-2 instead of sleeping ones")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, args=(arguments, folder), nprocs=arguments.ranks)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
