"""One way of training a network, in its own process: `python -m benchmarks.compare_contestants WAY FOLDER`.

`benchmarks.compare` starts these and tells them when to train. The folder holds the task, batches and ONNX files.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.compare_networks import IGNORED, IMAGES, SIZES, loss_of, make_batches, make_network
from benchmarks.compare_protocol import reset_peak, resident_bytes, say, serve

RATES = {
    "resnet50": 1e-6,
    "mobilenet": 1e-6,
}  # normalized over few images, it magnifies every rounding at a higher rate
RATE = 1e-4
BATCHES = 4
Step = Callable[[int], float]


@dataclass(frozen=True)
class Task:
    """What is trained, and how.

    Attributes:
        model, size: names in `compare_networks`.
        device: cpu or cuda.
        bf16: compute in 16 bits, with fp32 masters.
        channels_last: for images, in compiled hand-written networks.
        threads: of torch.
        onnx2torch: a folder to import it from; None: it is installed, or left out.
        clip: the largest gradient norm; None: any.
    """

    model: str
    size: str
    device: str
    bf16: bool
    channels_last: bool
    threads: int
    onnx2torch: str | None = None
    clip: float | None = None

    @property
    def feature(self) -> str:
        """The input of the network."""
        return "images" if self.model in IMAGES else "input_ids"

    @property
    def rate(self) -> float:
        """The learning rate."""
        return RATES.get(self.model, RATE)


def prepare(task: Task, folder: Path) -> None:
    """Writes batches, both ONNX files (today's exporter and the older one), and the work of a step."""
    import numpy as np
    from torch.utils.flop_counter import FlopCounterMode

    size = SIZES[task.model][task.size]
    batches = make_batches(task.model, size, BATCHES)
    flat = {f"{index}/{name}": value.numpy() for index, batch in enumerate(batches) for name, value in batch.items()}
    np.savez(folder / "batches.npz", **flat)  # type: ignore[arg-type]
    network = make_network(task.model, size)
    example = (batches[0][task.feature],)
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        make_network(task.model, size)(torch.empty_like(example[0], device="meta"))
    size_of = {"weights": sum(p.numel() for p in network.parameters()), "flops": 3 * counter.get_total_flops(),
               "rate": task.rate}  # fmt: skip
    (folder / "work.json").write_text(json.dumps(size_of))
    network.eval()
    names: dict[str, Any] = {"input_names": [task.feature], "output_names": ["logits"]}
    # Constant folding would melt normalization into convolutions, and nothing would be left of it to train.
    program = torch.onnx.export(network, example, dynamo=True, optimize=False, verbose=False, **names)
    assert program is not None
    program.save(folder / "model.onnx", external_data=True)
    say({"work": size_of})
    try:
        keep = torch.onnx.TrainingMode.PRESERVE
        options: dict[str, Any] = {"dynamo": False, "opset_version": 14, "training": keep, "do_constant_folding": False}
        torch.onnx.export(WithLoss(network.train()), (example[0], batches[0]["labels"]), folder / "loss.onnx",
                          input_names=[task.feature, "labels"], output_names=["loss"], **options)  # fmt: skip
        # For inference, as onnx2torch wants it: it reads no batch normalization that keeps statistics.
        torch.onnx.export(network.eval(), example, folder / "older.onnx", **names, **options)
    except Exception as error:  # the older exporter may be gone, or miss what it needs: those who read its file say so
        print(f"the older exporter failed: {error}", file=sys.stderr)


class WithLoss(nn.Module):
    """A network and its loss as one module, for training that wants both in one file."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, feature: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.network(feature), labels)


def onward_fields(task: Task, folder: Path) -> dict[str, dict[str, Any]]:
    """What a RUN.yaml would say, section by section."""
    loss = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels", "ignore_index": IGNORED}
    return {
        "paths": {"model_path": folder / "model.onnx"},
        "loss": loss,
        "training": {"batch_size": SIZES[task.model][task.size].batch, "num_train_steps": 1_000_000},
        "learning_rate": {"initial_lr": task.rate},
        "optimizer": {"training_optimizer_name": "AdamW", "optimizer_attributes": [ADAMW]},
        "mixed_precision": {"use_mixed_precision": task.bf16, "use_bfloat16": task.bf16},
    }


def fields_of(way: str, task: Task) -> dict[str, dict[str, Any]]:
    """What a way of onward asks for in addition to `onward_fields`."""
    precision = onward_fields(task, Path())["mixed_precision"]
    asked: dict[str, dict[str, dict[str, Any]]] = {
        "onward": {},
        "onward compiled": {"speed": {"compile": True}},
        "onward uncompiled": {"speed": {"compile": False}},
        "onward float8": {"mixed_precision": {**precision, "float8": True}},
        "onward CUDA graphs": {"speed": {"compile": True, "cuda_graphs": True}},
    }
    return asked[way]


def make_onward(task: Task, folder: Path, changes: Mapping[str, Mapping[str, Any]]) -> Step:
    """onward, from the ONNX file on, step by step as its runner does; `changes` are fields in addition to
    `onward_fields`.
    """
    import numpy as np

    stored = np.load(folder / "batches.npz")
    names = (task.feature, "labels")
    data = {name: np.concatenate([stored[f"{index}/{name}"] for index in range(BATCHES)]) for name in names}
    return train_with_onward({**onward_fields(task, folder), **changes}, data, task.device, task.threads, task.clip)


def train_with_onward(
    fields: Mapping[str, Mapping[str, Any]], data: Mapping[str, Any], device: str, threads: int, clip: float | None
) -> Step:
    """onward as its runner trains, one update a call.

    Args:
        fields: of a RUN.yaml; the batch size and the learning rate are taken from it.
        data: input or label -> array of all samples.
        device: cpu or cuda.
        threads: of torch.
        clip: the largest gradient norm; None: any.
    """
    from onward.data.in_memory import InMemoryDataLoader
    from onward.engine.building.assembly import assemble
    from onward.engine.building.preparation import feature_ranges, plan_run, read_training_graph
    from onward.engine.inputs.loss_normalization import LossNormalization
    from onward.engine.steps import Steps, WatchedNames
    from onward.environment import Environment
    from onward.parallel.launch.process import in_world_of_one
    from onward.parameters import Parameters

    parameters = Parameters.from_mapping(fields)
    Environment(execution_provider="CUDA" if device == "cuda" else "CPU", threads=threads).apply()
    mesh = in_world_of_one("cuda" if device == "cuda" else "cpu")
    graph = read_training_graph(parameters, parameters.paths.model_path)
    assert graph.loss_names is not None
    loader = InMemoryDataLoader(data)
    plan = plan_run(parameters, mesh.topology, graph, loader.feature_specs())
    notes: list[str] = []
    assembly = assemble(parameters, mesh, graph, plan, notes.append, loader.feature_specs())
    print(*graph.notes, *assembly.notes, sep="\n", file=sys.stderr, flush=True)
    assembly.state.train(True)
    assembly.state.mark()
    shares = LossNormalization(mesh, parameters.loss, graph.loss_names, parameters.training, False)
    compute = assembly.micro_batches(shares, (), {}, feature_ranges(parameters.loss, graph), None)
    steps = Steps(assembly.state, compute, 1, clip, WatchedNames(), assembly.reduction)
    batches = loader.batches(fields["training"]["batch_size"])
    rate = fields["learning_rate"]["initial_lr"]

    def step(_: int) -> float:
        steps.update(next(batches), rate, False)
        return steps.take_mean_loss()

    return step


ADAMW = {"weights": "*", "alpha": 0.9, "beta": 0.999, "lambda": 0.01, "epsilon": 1e-8}


def make_by_hand(task: Task, network: nn.Module, compiled: bool) -> Step:
    """A torch module trained by a plain loop."""
    size, device = SIZES[task.model][task.size], torch.device(task.device)
    network = network.to(device).train()
    last = compiled and task.channels_last and task.model in IMAGES
    if last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(network.parameters(), task.rate, (0.9, 0.999), 1e-8, 0.01, fused=True)
    batches = [{k: v.to(device) for k, v in b.items()} for b in make_batches(task.model, size, BATCHES)]
    low = torch.autocast(device.type, torch.bfloat16) if task.bf16 else contextlib.nullcontext()

    def compute_loss(feature: Tensor, labels: Tensor) -> Tensor:
        return loss_of(network(feature), labels)

    compute = torch.compile(compute_loss) if compiled else compute_loss

    def step(number: int) -> float:
        batch = batches[number % BATCHES]
        feature = batch[task.feature]
        if last:
            feature = feature.to(memory_format=torch.channels_last)
        with low:
            loss = compute(feature, batch["labels"])
        loss.backward()
        if task.clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def make_onnx2torch(task: Task, folder: Path) -> Step:
    """The ONNX file through onnx2torch, which asks for torchvision: a stub does for models without its operators."""
    if task.onnx2torch is not None:
        sys.path.append(task.onnx2torch)
    vision, operators = types.ModuleType("torchvision"), types.ModuleType("torchvision.ops")
    vision.ops = operators  # type: ignore[attr-defined]
    for name in ("roi_align", "nms", "batched_nms", "deform_conv2d"):
        setattr(operators, name, None)
    sys.modules.setdefault("torchvision", vision)
    sys.modules.setdefault("torchvision.ops", operators)
    from onnx2torch import convert

    try:
        network = convert(str(folder / "model.onnx"))
    except Exception as error:
        print(f"onnx2torch on today's export: {type(error).__name__}: {error}", file=sys.stderr)
        network = convert(str(folder / "older.onnx"))
    if task.model not in IMAGES:  # where constants are running statistics, and layers have their weights
        let_initializers_train(network)
    if not any(True for _ in network.parameters()):
        raise RuntimeError("onnx2torch found no weights to train")
    return make_by_hand(task, network, compiled=False)


def let_initializers_train(network: nn.Module) -> None:
    """Makes weights of the constants that onnx2torch reads outside of layers it knows, as of a product without `Gemm`.

    It keeps them without names, so a tied weight that the exporter transposed comes apart here.
    """
    container = dict(network.named_children()).get("initializers")
    for name, tensor in list(container.named_buffers()) if container is not None else ():
        if tensor.is_floating_point() and tensor.numel() > 1:
            delattr(container, name)
            container.register_parameter(name, nn.Parameter(tensor))  # type: ignore[union-attr]


def make_product(task: Task) -> Step:
    """No network, but the machine's own rate of matrix products: a step gives floating point operations a second."""
    import time

    count, times = (2048, 1) if task.device == "cpu" else (8192, 8)
    dtype = torch.bfloat16 if task.bf16 else torch.float32
    left, right = (torch.randn(count, count, device=task.device, dtype=dtype) for _ in range(2))
    clock = time.process_time if task.device == "cpu" else time.perf_counter

    def step(_: int) -> float:
        synchronize(task.device)
        started = clock()
        for _ in range(times):
            torch.mm(left, right)
        synchronize(task.device)
        return times * 2 * count**3 / (clock() - started)

    return step


def synchronize(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_of_tensors(device: str, step: Callable[[], float]) -> int:
    """The most bytes that tensors took at once in a step, all that was alive before included."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    import gc

    gc.collect()
    alive = _storage_sizes()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    now = most = sum(alive.values())
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def write_profile(device: str, step: Callable[[], float], path: Path) -> None:
    """What the time of a step goes to, operator by operator."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        synchronize(device)
    events = profile.key_averages()
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    path.write_text(events.table(sort_by=order, row_limit=15, max_name_column_width=60))


def _storage_sizes() -> dict[int, int]:
    """The size in bytes of every storage of tensors that are alive, by its address."""
    import gc

    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) not in (Tensor, nn.Parameter) or thing.device.type != "cpu":
            continue
        try:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        except (RuntimeError, NotImplementedError):  # the compiler keeps tensors without memory
            continue
    return found


def main() -> None:
    way, folder = sys.argv[1], Path(sys.argv[2])
    task = Task(**json.loads((folder / "task.json").read_text()))
    torch.set_num_threads(task.threads)
    torch.set_float32_matmul_precision("high")
    if way == "prepare":
        prepare(task, folder)
        return
    baseline = resident_bytes("VmRSS")
    reset_peak()
    try:
        if way == "product":
            step = make_product(task)
        elif way == "onnx2torch":
            step = make_onnx2torch(task, folder)
        elif way.startswith("onward"):
            step = make_onward(task, folder, fields_of(way, task))
        else:
            step = make_by_hand(task, make_network(task.model, SIZES[task.model][task.size]), way == "compiled")
    except Exception as error:
        said = str(error).strip().splitlines()
        say({"failure": f"{type(error).__name__}: {said[0][:200] if said else ''}"})
        raise

    def memory(one: Callable[[], float]) -> int:
        found = peak_of_tensors(task.device, one)
        write_profile(task.device, one, folder / f"{way}.profile")
        return found

    serve(step, memory, baseline)


if __name__ == "__main__":
    main()
