"""What torch's compiler generates for an H100 of the segments of entire runs, forward and backward."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import io
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from benchmarks.compare_networks import NETWORKS, Bottleneck, Size
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from onward.lowering.ops import fused_cross_entropy
from tests.fake_gpu.h100 import generating_code
from tests.fake_gpu.runs import ADAMW, BF16, CROSS_ENTROPY, Case, run
from tests.fake_gpu.tensors import fake_gpu

SAMPLES, BATCH, TOKENS, WORDS = 16, 2, 128, 1024
LANGUAGE = Size(BATCH, TOKENS, layers=6, width=256, heads=4, groups=2, inner=1024, words=WORDS)
"""Two segments of three layers."""
NARROW = dataclasses.replace(LANGUAGE, width=128, heads=2)
"""Chunks of logits have as many rows as a layer is wide."""

CALL = re.compile(r"^ +(?:\w+ = )?(?:extern_kernels|torch\.ops\.\w+)\.(\w+)", re.MULTILINE)
LAUNCH = re.compile(r"^ +triton_\w+\.run\(", re.MULTILINE)
SPILLED = re.compile(r"(\d+) bytes spill stores")
"""In the log of ptxas."""


class Blocks(nn.Module):
    """What a ResNet-50 begins with, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.blocks = nn.Sequential(Bottleneck(64, 64, 1), Bottleneck(256, 64, 1))
        self.head = nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def _exported(make: Callable[[], nn.Module], feature: str, example: torch.Tensor) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        torch.manual_seed(0)
        names: dict[str, Any] = {"input_names": [feature], "output_names": ["logits"]}
        # Optimized, batch normalization would be folded into convolutions, and nothing of it would be trained.
        program = torch.onnx.export(make().eval(), (example,), dynamo=True, optimize=False, verbose=False, **names)
        assert program is not None
        program.save(path)

    return write


def _language(name: str, size: Size = LANGUAGE, **sections: Any) -> Case:
    generator = np.random.default_rng(0)
    shape = (SAMPLES, TOKENS)
    features = {"input_ids": generator.integers(0, WORDS, shape), "labels": generator.integers(0, WORDS, shape)}
    if name == "bert":
        features["labels"][generator.random(shape) > 0.15] = -100
    example = torch.from_numpy(features["input_ids"][:BATCH])
    model = _exported(functools.partial(NETWORKS[name], size), "input_ids", example)
    return Case(model, features, {"optimizer": ADAMW, "loss": {**CROSS_ENTROPY, "ignore_index": -100}, **sections})


def _images(**sections: Any) -> Case:
    generator = np.random.default_rng(0)
    images = generator.standard_normal((SAMPLES, 3, 64, 64)).astype(np.float32)
    features: dict[str, np.ndarray] = {"images": images, "labels": generator.integers(0, 10, SAMPLES)}
    return Case(
        _exported(Blocks, "images", torch.from_numpy(images[:BATCH])), features, {"optimizer": ADAMW, **sections}
    )


LOGITS_HELD = {False: fused_cross_entropy.COMPILED_BYTES["cuda"], True: 2**16}
LOGITS_IN_CHUNKS = "GPT-2, bf16, logits in chunks"

CASES: dict[str, Case] = {
    "GPT-2": _language("gpt2"),
    "GPT-2, bf16": _language("gpt2", mixed_precision=BF16),
    "GPT-2, float8": _language("gpt2", mixed_precision={**BF16, "float8": True}),
    "GPT-2, bf16, CUDA graphs": _language("gpt2", mixed_precision=BF16, speed={"cuda_graphs": True}),
    LOGITS_IN_CHUNKS: _language("gpt2", NARROW, mixed_precision=BF16),
    "BERT": _language("bert"),
    "BERT, bf16": _language("bert", mixed_precision=BF16),
    "Llama": _language("llama"),
    "Llama, bf16": _language("llama", mixed_precision=BF16),
    "ResNet": _images(),
    "ResNet, bf16": _images(mixed_precision=BF16),
}


@dataclasses.dataclass
class Kernel:
    """One of Triton: its target, and the bytes of registers that did not fit."""

    name: str
    target: str
    machine_code_bytes: int
    spilled_bytes: int


@dataclasses.dataclass
class Pass:
    """One generated function.

    Attributes:
        kernels: of Triton.
        launches: of these; equal ones are one kernel.
        calls: of torch's own kernels -> how often.
        not_recorded: why it would not become a CUDA graph, in torch's words; None: it would, or nobody asked.
    """

    is_backward: bool
    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    launches: int = 0
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    not_recorded: str | None = None


@dataclasses.dataclass
class Graph:
    """What became of one segment.

    Attributes:
        operators: ONNX names of what it computes, in order.
        breaks: reasons for which torch cut it -> how often.
        pieces: how many graphs torch made of it.
        is_recorded: CUDA graphs were asked for.
        error: why it could not be compiled.
    """

    operators: list[str]
    is_recorded: bool
    breaks: dict[str, int] = dataclasses.field(default_factory=dict)
    pieces: int = 0
    passes: list[Pass] = dataclasses.field(default_factory=list)
    error: str | None = None


class Generated:
    """In place of what `torch.compile` returns: generates code at the first call, and computes values without it."""

    def __init__(
        self, code: torch.fx.GraphModule, hooks: ctypes.CDLL, how: Mapping[str, Any], graphs: list[Graph]
    ) -> None:
        self.code, self.hooks, self.how, self.graphs = code, hooks, how, graphs
        self.strides: list[Any] = []
        self.is_compiled = False

    def __call__(self, *arguments: Any) -> Any:
        """The segment's values; evaluation, whose code is that of the forward pass, is not compiled."""
        if not self.is_compiled and torch.is_grad_enabled():
            self.is_compiled = True
            labels = [node.meta.get("onnx") for node in self.code.graph.nodes if node.op == "call_function"]
            is_recorded = self.how["options"].get("triton.cudagraphs", False)
            graph = Graph([label.op_type for label in labels if label is not None], is_recorded)
            self.graphs.append(graph)
            try:
                with generating_code(self.hooks) as mode:
                    self.strides = self._generate(arguments, mode, graph)
            except Exception as error:
                graph.error = "".join(traceback.format_exception(error))
        values = self.code(*arguments)
        return tuple(map(_laid_out, values, self.strides)) if self.strides else values

    def _generate(self, arguments: tuple[Any, ...], mode: FakeTensorMode, graph: Graph) -> list[Any]:
        """Generates both passes; the strides of what the forward pass returns."""
        twins: dict[int, torch.Tensor] = {}

        def twin(leaf: Any) -> Any:
            """A tensor without values; the same one for the same tensor."""
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in twins:
                with mode:
                    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
                twins[id(leaf)] = made.requires_grad_(leaf.requires_grad)
            return twins[id(leaf)]

        torch._dynamo.reset()
        counters.clear()
        backend = functools.partial(compile_fx, inner_compile=functools.partial(_compile_only, mode, graph))
        with config.patch(self.how["options"]), torch._dynamo.config.patch(optimize_ddp=False):
            results = TORCH_COMPILE(self.code, backend=backend, dynamic=False)(*tree_map(twin, arguments))
            trained = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if trained:
                with mode:
                    gradients = [torch.empty_like(leaf) for leaf in trained]
                torch.autograd.backward(trained, gradients)  # torch generates the backward pass when it comes to it
        strides = [leaf.stride() if isinstance(leaf, torch.Tensor) else None for leaf in results]
        graph.breaks, graph.pieces = dict(counters["graph_break"]), counters["stats"]["unique_graphs"]
        return strides


TORCH_COMPILE = torch.compile


def _laid_out(value: Any, strides: Any) -> Any:
    """A value as the generated code would leave it in memory: the next segment is compiled for that."""
    if not isinstance(value, torch.Tensor) or value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _compile_only(
    mode: FakeTensorMode, graph: Graph, module: torch.fx.GraphModule, inputs: Any, **settings: Any
) -> Any:
    """Inductor on one pass; gives a function that computes what it would, for tensors without values."""
    found = Pass(bool(settings.get("is_backward")))
    graph.passes.append(found)
    sources: list[str] = []
    compile_kernel = triton.compile

    def compile_and_note(source: Any, **options: Any) -> Any:
        log = io.StringIO()
        with contextlib.redirect_stdout(log), triton.knobs.nvidia.scope():
            triton.knobs.nvidia.dump_ptxas_log = True
            binary = compile_kernel(source, **options)
        (target,) = re.findall(r"^\.target (\w+)", binary.asm["ptx"], re.MULTILINE)
        (spilled,) = SPILLED.findall(log.getvalue())
        found.kernels.append(Kernel(source.name, target, len(binary.asm["cubin"]), int(spilled)))
        return binary

    with (
        mock.patch.object(triton, "compile", compile_and_note),
        mock.patch.object(GraphLowering, "save_output_code", sources.append, create=True),
    ):
        code: Any = compile_fx_inner(module, inputs, **settings)
    (source,) = sources
    found.launches = len(LAUNCH.findall(source))
    found.calls = dict(Counter(CALL.findall(source)))
    found.not_recorded = code.disabled_cudagraphs_reason

    def compute(arguments: list[Any]) -> Any:
        with mode:
            return module(*arguments)

    compute._boxed_call = True  # type: ignore[attr-defined]
    return compute


def run_all(names: list[str], hooks: ctypes.CDLL) -> dict[str, Any]:
    """Case -> its losses on the fake GPU, and what was generated of its segments."""
    answer: dict[str, Any] = {}
    for name in names or list(CASES):
        graphs: list[Graph] = []

        def generate(code: torch.fx.GraphModule, graphs: list[Graph] = graphs, **how: Any) -> Generated:
            return Generated(code, hooks, how, graphs)

        with (
            tempfile.TemporaryDirectory() as folder,
            fake_gpu(),
            mock.patch.object(torch, "compile", generate),
            mock.patch.dict(fused_cross_entropy.COMPILED_BYTES, cuda=LOGITS_HELD[name == LOGITS_IN_CHUNKS]),
        ):
            found = run(CASES[name], "CUDA", Path(folder), compiled="auto")
        print(name, flush=True)
        answer[name] = {"losses": found["losses"], "graphs": [dataclasses.asdict(graph) for graph in graphs]}
    return answer
