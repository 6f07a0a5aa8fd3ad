"""Whether a run compiles its segments: a rule of the model, the machine's compilers and the length of the run.

Nothing is measured, so that a run that is repeated or resumed on the same machine has the same bits.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch

from onward.errors import ParametersError
from onward.graph.operators import Fact, operators_with
from onward.graph.training_graph import TrainingGraph
from onward.lowering.program import Program
from onward.plan.costs.costs import OPERATIONS_PER_BYTE, measure_costs
from onward.plan.roles import node_id

_UNCHANGED = operators_with(Fact.SAME_ELEMENTS | Fact.VIEW | Fact.SHAPE_ONLY | Fact.MATMUL) - {"Einsum"} | {
    "Constant", "Gather", "Attention",
}  # fmt: skip
"""What is as fast compiled or not: other views of the same memory, rows of tables, torch's own kernels for products."""

_SINGLE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Cast", "Relu", "Tanh", "Sigmoid", "Gelu", "LayerNormalization"}
)
"""What is one kernel compiled or not: nothing is gained unless another is next to it."""

CONVOLUTIONS = operators_with(Fact.CONVOLUTION)

_JOINED = operators_with(Fact.UNARY | Fact.BROADCASTING) | {
    "Clip", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum",
    "ReduceSumSquare", "SwiGLU",
}  # fmt: skip
"""What the compiler joins with its neighbors into one pass over memory."""

_SLOWER = frozenset({
    "AveragePool", "CumProd", "CumSum", "LogSoftmax", "MaxPool", "Scatter", "ScatterElements", "ScatterND", "Softmax",
    "TopK", "Unique",
})  # fmt: skip
"""What a CPU computes as fast or slower in compiled code: sorts with running sums took twice as long, a network with a
softmax over six neighbors 1.3 times."""

LEAST_SHARE = 0.6
"""Of an update's estimated time, what the compiler joins must take for `auto` to compile on a CPU."""

LEAST_SECONDS = 120.0
"""What these nodes must take in a run, estimated: several times what compiling costs (10 to 40 s)."""

FEWEST_STEPS = 1000
"""Of a run that is looked at for this: below, reading the graph would cost more than it could gain."""

_OPERATIONS_PER_SECOND = 1.5e11
"""Of one core in fp32."""


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
) -> CompilationChoice:
    """Decides on compilation.

    Args:
        wanted: `speed.compile`.
        graph: what is trained.
        device: where.
        dimensions: symbolic dimensions of the inputs -> sizes in a micro-batch, as far as they are known.
        step_count: forward/backward passes of the run.

    Raises:
        ParametersError: it is wanted, and what it needs is not on this machine.
    """
    if wanted is False:
        return CompilationChoice(False, None)
    missing = _missing(device)
    if wanted is True:
        if missing is not None:
            raise ParametersError(f"speed.compile is true, but {missing} Or set speed.compile to auto or false.")
        return CompilationChoice(True, None)
    if missing is not None:
        return CompilationChoice(False, f"speed.compile: off on this machine, since {missing}")
    if device.type == "cuda":
        return CompilationChoice(True, "speed.compile: on, segment by segment, as always on a GPU.")
    kinds = {node.op_type for node in graph.model.graph}
    if kinds & CONVOLUTIONS:
        return _off("convolutions run slower compiled")
    if kinds & _SLOWER:
        return _off(f"a model with {' and '.join(sorted(kinds & _SLOWER))} runs slower compiled")
    if step_count < FEWEST_STEPS:
        return _off("compiling gains too little")
    share, seconds = _joined_time(graph, dimensions)
    if share < LEAST_SHARE:
        return _off("compiling gains too little")
    if seconds * step_count < LEAST_SECONDS:
        return _off("compiling takes longer than it saves in this run")
    return CompilationChoice(
        True,
        f"speed.compile: on, since elementwise operators, which the compiler joins, take about {share:.0%} of an "
        "update. The first step takes longer; `false` turns it off.",
    )


def _off(reason: str) -> CompilationChoice:
    return CompilationChoice(False, f"speed.compile: off, since on a CPU {reason}; `true` turns it on.")


def _joined_time(graph: TrainingGraph, dimensions: Mapping[str, int]) -> tuple[float, float]:
    """What nodes take that the compiler joins: their estimated share of a pass, and the seconds of one core."""
    costs = measure_costs(graph, dimensions)
    joined = total = 0.0
    for node in graph.model.graph:
        cost = costs.nodes.get(node_id(node))
        if cost is None:
            continue
        # A pass forward moves the bytes of the inputs and outputs once, a pass backward about twice.
        moving = 3 * cost.moved_bytes * OPERATIONS_PER_BYTE
        total += moving + cost.forward + cost.backward_input + cost.backward_weight
        joined += moving if node.op_type in _JOINED else 0.0
    return (joined / total if total else 0.0), joined / _OPERATIONS_PER_SECOND


def _missing(device: torch.device) -> str | None:
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


def joins(program: Program, device: torch.device) -> bool:
    """Whether compiling a program can gain anything: two of its nodes, or the parts of one, may become one kernel.

    On a CPU the cross entropy of the last layer, as it is, goes through the logits in blocks of the cache; compiled
    it would hold them all.
    """
    operators = {
        label.name: label.op_type
        for label in (node.meta.get("onnx") for node in program.code.graph.nodes if node.op == "call_function")
        if label is not None
    }
    kept = _UNCHANGED | {"LinearCrossEntropy"} if device.type == "cpu" else _UNCHANGED
    computing = [operator for operator in operators.values() if operator not in kept]
    return len(computing) > 1 or any(operator not in _SINGLE for operator in computing)
