"""Whether a run compiles its segments: a rule of the model, the machine's compilers and the length of the run.

Nothing is measured, so that a run that is repeated or resumed on the same machine has the same bits.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import onnx_ir as ir
import torch

from onward.engine.network.compilation_gain import estimate_gain
from onward.errors import ModelError, ParametersError
from onward.graph.fusion.cross_entropy import FUSED_LOSS
from onward.graph.operators import Fact, operators_with
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import input_types
from onward.lowering.program import Program
from onward.parallel.agreement import gather_texts
from onward.parallel.launch.process import Mesh
from onward.plan.costs.costs import GraphCosts

_UNCHANGED = operators_with(Fact.SAME_ELEMENTS | Fact.VIEW | Fact.SHAPE_ONLY | Fact.MATMUL) - {"Einsum"} | {
    "Constant", "Gather", "Attention",
}  # fmt: skip
"""What is as fast compiled or not: other views of the same memory, rows of tables, torch's own kernels for products."""

_SINGLE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Cast", "Relu", "Tanh", "Sigmoid", "Gelu", "LayerNormalization"}
)
"""What is one kernel compiled or not: nothing is gained unless another is next to it."""

_STEP_BY_STEP = operators_with(Fact.RECURRENT) | {"Loop", "Scan"}
"""Loops over an axis, each step of which the compiler takes for code of its own: long ones would take minutes."""

LEAST_SAVED_SHARE = 1 / 25
"""Of a step's estimated time, what compiled code must save for `auto` to compile on a CPU."""

LEAST_TIMES_REPAID = 5.0
"""Of the estimated time of compiling, what it must save in a run, both for one core: the compiler can take more than
three times as long, and several cores save less of a run's time."""

MOST_LOGITS_BYTES = 2 * 2**20
"""Of a last layer whose loss is compiled with it on a CPU: so a step takes 0.96 to 1.02 of the time (a GPT-2 of two
layers of width 64: 0.9), with 4 MiB 1.03."""

FEWEST_STEPS = 1000
"""Of a run that is looked at for this: below, reading the graph would cost more than it could gain."""


@dataclass(frozen=True)
class CompilationChoice:
    """Whether a network is compiled, and why, in one sentence for the user."""

    is_on: bool
    note: str | None


def choose(
    wanted: Literal["auto", True, False],
    graph: TrainingGraph,
    device: torch.device,
    dimensions: Mapping[str, int],
    step_count: int,
    missing: str | None,
    count_costs: Callable[[TrainingGraph, Mapping[str, int]], GraphCosts],
) -> CompilationChoice:
    """Decides on compilation, alike on all ranks that are given the same.

    Args:
        wanted: `speed.compile`.
        graph: what is trained.
        device: where.
        dimensions: symbolic dimensions of the inputs -> sizes in a micro-batch, as far as they are known.
        step_count: forward/backward passes of the run.
        missing: what torch's compiler lacks where the ranks are, as `missing_anywhere` gives it; None: nothing.
        count_costs: gives what a micro-batch of such sizes costs.

    Raises:
        ParametersError: it is wanted, and what it needs is missing.
    """
    if wanted is False:
        return CompilationChoice(False, None)
    if wanted is True:
        if missing is not None:
            raise ParametersError(f"speed.compile is true, but {missing} Or set speed.compile to auto or false.")
        return CompilationChoice(True, None)
    if missing is not None:
        return CompilationChoice(False, f"speed.compile: off, since {missing}")
    if device.type == "cuda":
        return CompilationChoice(True, "speed.compile: on, segment by segment, as always on a GPU.")
    if step_count < FEWEST_STEPS:
        return _off("compiling gains too little in a run of this length")
    if unknown := sorted({size for size in _symbolic_sizes(graph) if size not in dimensions}):
        return _off(f"each new size of {' and '.join(map(repr, unknown))} would be compiled anew")
    if loops := sorted(_STEP_BY_STEP & {node.op_type for node in graph.model.graph}):
        return _off(f"each step of {' and '.join(loops)} would be compiled for itself")
    try:
        gain = estimate_gain(graph, count_costs(graph, dimensions))
    except ModelError:  # shapes that contradict each other may be of values that nobody needs
        return _off("what compiling gains cannot be estimated from the model's shapes")
    if gain.saved_share < LEAST_SAVED_SHARE:
        return _off("compiling gains too little")
    saved_seconds = gain.saved_seconds * step_count
    if saved_seconds < LEAST_TIMES_REPAID * gain.compiling_seconds:
        return _off(
            f"it would save about {saved_seconds:.1f} s of one core in this run, less than {LEAST_TIMES_REPAID:.0f} "
            f"times the {gain.compiling_seconds:.0f} s that compiling may take"
        )
    return CompilationChoice(
        True,
        f"speed.compile: on, since it saves passes over memory that take about {gain.saved_share:.0%} of a step. "
        f"The first step takes about {gain.compiling_seconds:.0f} s longer; `false` turns it off.",
    )


def joins_loss(graph: TrainingGraph, device: torch.device, dimensions: Mapping[str, int]) -> bool:
    """Whether the loss of the last layer is compiled with what is before it, where anything is.

    On a CPU the loss goes through large logits in blocks that fit the cache if it is not compiled; small ones take
    less time than calling it.
    """
    shapes = input_types(graph)[1]
    losses = [node for node in graph.model.graph if node.op_type == FUSED_LOSS]
    return device.type == "cpu" and all(_logits_bytes(loss, shapes, dimensions) <= MOST_LOGITS_BYTES for loss in losses)


def _logits_bytes(loss: ir.Node, shapes: Mapping[str, Sequence[int | str]], dimensions: Mapping[str, int]) -> float:
    """Of as many rows as the input has elements that the labels are made of; infinite where that is not known."""
    labels, weight = loss.inputs[2], loss.inputs[1]
    while labels is not None and (maker := labels.producer()) is not None:
        labels = maker.inputs[0] if maker.inputs else None
    sizes = shapes.get(str(labels.name)) if labels is not None else None
    counts = [dimensions.get(size) if isinstance(size, str) else size for size in sizes or (None,)]
    classes = (
        None
        if weight is None or weight.shape is None
        else weight.shape[1 - loss.attributes.get_int("rows_are_classes", 1)]
    )
    if not isinstance(classes, int) or None in counts:
        return math.inf
    return 4.0 * classes * math.prod(count for count in counts if count is not None)


def _symbolic_sizes(graph: TrainingGraph) -> set[str]:
    """Of the graph's inputs."""
    return {size for shape in input_types(graph)[1].values() for size in shape if isinstance(size, str)}


def _off(reason: str) -> CompilationChoice:
    return CompilationChoice(False, f"speed.compile: off, since on a CPU {reason}; `true` turns it on.")


def missing_anywhere(mesh: Mesh) -> str | None:
    """What torch's compiler lacks on a machine of the run; None: nothing. All ranks must call this.

    Ranks that compile and ranks that do not would cut their networks into other segments, and wait for each other.
    """
    for rank, missing in enumerate(gather_texts(mesh, missing_here(mesh.device) or "")):
        if missing:
            return missing if mesh.world_size == 1 else f"on the machine of rank {rank} {missing}"
    return None


def missing_here(device: torch.device) -> str | None:
    """What torch's compiler lacks on this machine, and what to install; None: nothing."""
    if device.type == "cuda":
        if find_spec("triton") is None:
            return "the package triton, with which torch compiles for GPUs, is not installed: pip install triton."
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]
        what, package = "C", "gcc"
    else:
        # The one that torch._inductor calls on Linux.
        names, what, package = [os.environ.get("CXX", "g++")], "C++", "g++"
    if any(shutil.which(name) is not None for name in names):
        return None
    listed = " nor ".join(map(repr, names))
    return (
        f"no {what} compiler was found (neither {listed} is on the PATH), which torch needs for it: install one, as by "
        f"`apt install {package}`, or name it in {'CC' if what == 'C' else 'CXX'}."
    )


def gains_from_compiling(program: Program, device: torch.device) -> bool:
    """Whether compiling a program can gain anything: two of its nodes, or the parts of one, may become one kernel.

    On a CPU the cross entropy of the last layer goes through the logits in blocks that fit the cache if it is not
    compiled.
    """
    operators = {
        label.name: label.op_type
        for label in (node.meta.get("onnx") for node in program.code.graph.nodes if node.op == "call_function")
        if label is not None
    }
    kept = _UNCHANGED | {FUSED_LOSS} if device.type == "cpu" else _UNCHANGED
    computing = [operator for operator in operators.values() if operator not in kept]
    return len(computing) > 1 or any(operator not in _SINGLE for operator in computing)
