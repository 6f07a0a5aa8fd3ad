"""The memory that `onward plan` forecasts against what training takes: `python -m benchmarks.memory [--only NAME]`.

Measured by torch's profiler, which hears of every allocation and release of the CPU's allocator, on every rank from the
start of the run to its third update; forecast on tensors without memory. Prints both, and the ratio, for every pair of
model and layout.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from tests.ranks import run_on_ranks
from torch.profiler import ProfilerActivity, profile

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.forecast.plan_forecast import forecast
from onward.environment import Environment
from onward.models import create_model
from onward.parallel.data_parallel import local_part
from onward.parameters import Parameters
from onward.plan.topology import Topology
from onward.runner import TrainingRunner

BATCH, TOKENS = 4, 128
GPT2 = {"layers": 6, "heads": 4, "width": 128, "vocab_size": 1024, "context_length": TOKENS, "dropout": 0.0}
BERT = {"layers": 4, "heads": 4, "width": 128, "vocab_size": 1024}


def language() -> dict[str, np.ndarray]:
    """Tokens for one micro-batch of all replicas, several times."""
    drawn = np.random.default_rng(0).integers(0, 1024, (96, TOKENS + 1))
    return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:].copy()}


def pictures() -> dict[str, np.ndarray]:
    """Images for SqueezeNet."""
    drawn = np.random.default_rng(0)
    return {
        "images": drawn.normal(size=(96, 3, 64, 64)).astype(np.float32),
        "labels": drawn.integers(0, 10, 96),
    }


def gpt2() -> ir.Model:
    """A small GPT-2."""
    return create_model("gpt2", size="tiny", **GPT2)


def squeezenet() -> ir.Model:
    """SqueezeNet for ten classes."""
    return create_model("squeezenet", classes=10, image_size=64)


def sizes(data: int = 1, horizontal: int = 1, pipeline: int = 1, **more: Any) -> dict[str, Any]:
    """The section `distributed`."""
    return {
        "data_parallel_size": data,
        "horizontal_parallel_size": horizontal,
        "pipeline_parallel_size": pipeline,
        **more,
    }


BF16 = {"mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True}}
WRITTEN_OUT = {"speed": {"fuse": False}}
IN_BACKWARD = {"speed": {"update_in_backward": True}}
LION = {"optimizer": {"training_optimizer_name": "Lion"}}
PAIRS: dict[str, tuple[Callable[[], ir.Model], Callable[[], Any], dict[str, Any], int, Mapping[str, Any]]] = {
    "gpt2, 1 process": (gpt2, language, sizes(), 1, {}),
    "gpt2, 1 process, nothing fused": (gpt2, language, sizes(), 1, WRITTEN_OUT),
    "gpt2, 1 process, accumulation 2": (gpt2, language, sizes(), 2, {}),
    "gpt2, 1 process, bf16": (gpt2, language, sizes(), 1, BF16),
    "gpt2, 1 process, recompute": (gpt2, language, sizes(), 1, {"recompute": {"segments": True}}),
    "gpt2, 1 process, attention again": (gpt2, language, sizes(), 1, {**WRITTEN_OUT, "recompute": {"attention": True}}),
    "gpt2, 1 process, LAMB": (gpt2, language, sizes(), 1, {"optimizer": {"training_optimizer_name": "Lamb"}}),
    "gpt2, 1 process, update in backward": (gpt2, language, sizes(), 1, IN_BACKWARD),
    "gpt2, 1 process, Lion": (gpt2, language, sizes(), 1, LION),
    "gpt2, 1 process, Lion, update in backward": (gpt2, language, sizes(), 1, {**LION, **IN_BACKWARD}),
    "squeezenet, 1 process": (squeezenet, pictures, sizes(), 1, {}),
    "squeezenet, 2 replicas": (squeezenet, pictures, sizes(data=2), 1, {}),
    "gpt2, 2 replicas": (gpt2, language, sizes(data=2), 1, {}),
    "gpt2, 2 replicas, ZeRO 1": (gpt2, language, sizes(data=2, zero_stage=1), 1, {}),
    "gpt2, 2 replicas, ZeRO 1, bf16, 3": (gpt2, language, sizes(data=2, zero_stage=1), 3, BF16),
    "gpt2, 2 replicas, ZeRO 2": (gpt2, language, sizes(data=2, zero_stage=2), 2, {}),
    "gpt2, 2 replicas, ZeRO 3": (gpt2, language, sizes(data=2, zero_stage=3), 1, {}),
    "gpt2, 2 horizontal": (gpt2, language, sizes(horizontal=2), 1, {}),
    "gpt2, 2 stages, 1F1B": (gpt2, language, sizes(pipeline=2), 4, {}),
    "gpt2, 2 stages, GPipe": (gpt2, language, sizes(pipeline=2, pipeline_schedule="GPipe"), 4, {}),
    "gpt2, 2 x 2 stages, interleaved": (
        gpt2, language, sizes(pipeline=2, pipeline_schedule="Interleaved1F1B"), 4, {},
    ),
}  # fmt: skip


def parameters_of(path: Path, name: str) -> Parameters:
    """The run of a pair."""
    model, _, distributed, accumulation, more = PAIRS[name]
    sections: dict[str, Any] = {
        "paths": {"model_path": str(path)},
        "loss": {
            "type": "softmax_cross_entropy",
            "prediction": "logits",
            "label": "labels",
        },
        "training": {
            "batch_size": BATCH,
            "gradient_accumulation_steps": accumulation,
            "num_train_steps": 3 * accumulation,
            "mapped_dimensions": {"sequence": TOKENS} if model is gpt2 else {},
        },
        "learning_rate": {"initial_lr": 1e-3},
        "optimizer": {"training_optimizer_name": "AdamW"},
        "distributed": distributed,
    }
    return Parameters.from_mapping({**sections, **more})


def measure(path: Path, name: str) -> float:
    """The highest sum of allocations of this rank, in bytes."""
    data = PAIRS[name][1]()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watching:
        runner = TrainingRunner(parameters_of(path, name), Environment(execution_provider="CPU"), progress=False)
        loader = InMemoryDataLoader(data)
        runner.initialize(loader.feature_specs())
        runner.run(loader)
    assert watching.profiler is not None
    assert watching.profiler.kineto_results is not None
    events = sorted(_allocations(watching.profiler.kineto_results.experimental_event_tree()), key=lambda e: e[0])
    total = highest = 0
    for _, _, size in events:
        total += size
        highest = max(highest, total)
    return float(highest) + _held_by_numpy(runner, {address for _, address, _ in events})


def _allocations(tree: list[Any]) -> Iterator[tuple[int, int, int]]:
    """Time, address and bytes (negative: released) of every allocation of torch's, wherever it is in the tree."""
    waiting = [*tree]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = event.extra_fields
        if isinstance(fields, torch._C._profiler._ExtraFields_Allocation):
            yield event.start_time_ns, fields.ptr, fields.alloc_size


def _held_by_numpy(runner: TrainingRunner, allocated: Collection[int]) -> float:
    """Bytes of weights and constants in numpy's memory, which torch's allocator never saw.

    Whether a storage can be resized does not tell: torch forgets it where numpy has only looked at its memory.
    """
    tensors = [t for network in runner.state.networks for t in network.net.tensors_by_name().values()]
    storages = {s.data_ptr(): s for s in (local_part(t.detach()).untyped_storage() for t in tensors)}
    return float(sum(s.nbytes() for address, s in storages.items() if address not in allocated))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a part of a pair's name")
    only = parser.parse_args().only or ""
    torch.set_num_threads(1)
    print(f"{'model and layout':36} {'measured MB':>12} {'forecast MB':>12} {'ratio':>7}")
    for name in (name for name in PAIRS if only in name):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            ir.save(PAIRS[name][0](), path)
            parameters = parameters_of(path, name)
            topology = Topology.of_sizes(parameters.distributed)
            graph = read_training_graph(parameters, path)
            plan = plan_run(parameters, topology, graph, {})
            said = max(rank.memory.total for rank in forecast(parameters, graph, plan).ranks)
            if topology.world_size == 1:
                found = measure(path, name)
            else:
                found = max(run_on_ranks(topology.world_size, measure, path, name))
        print(f"{name:36} {found / 1e6:12.2f} {said / 1e6:12.2f} {said / found:7.3f}", flush=True)


if __name__ == "__main__":
    main()
