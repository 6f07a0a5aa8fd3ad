"""A network as a chain of segments for its training graph: equal ones are traced once, each with its backward pass.

The backward pass of a segment takes the gradients of what the segment hands on and gives those of what it takes, so
that gradients flow from one segment to the one before it, as in reverse-mode differentiation by hand.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from onward.artifacts.backward_decompositions import backward_decompositions
from onward.artifacts.lowered import Lowered
from onward.lowering.building.equal_segments import structure_of
from onward.lowering.building.segments import SegmentedProgram, split_program
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program
from onward.parameters.distributed import Recompute
from onward.plan.costs.segments import plan_segments

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class SegmentCode:
    """Forward and backward pass of all segments that are equal.

    Attributes:
        code: takes the values, weights, running statistics and constants that the segment reads, in the order of its
            program, then gradients of values; gives values, new running statistics and gradients.
        examples: what it can be called with, fake tensors.
        has_gradient: for each input that has a gradient, whether the loss depends on it.
    """

    code: fx.GraphModule
    examples: tuple[torch.Tensor, ...]
    has_gradient: tuple[bool, ...]

    @property
    def has_loops(self) -> bool:
        """Whether it has graphs inside that run several times."""
        return any(isinstance(module, fx.GraphModule) for module in self.code.children())


@dataclass(frozen=True, kw_only=True)
class SegmentUse:
    """One of the segments of a chain: which code it runs, on what.

    Attributes:
        code: number of its code.
        reads: names of features, values, weights, running statistics and constants that the code takes.
        takes_gradients_of: values whose gradients the code takes after these.
        gives: values that the code computes, and running statistics whose new values come after them.
        gives_gradients_of: values and weights whose gradients come last.
    """

    code: int
    reads: tuple[str, ...]
    takes_gradients_of: tuple[str, ...]
    gives: tuple[str, ...]
    gives_gradients_of: tuple[str, ...]


def split_into_segments(net: OnnxModule, program: Program) -> SegmentedProgram:
    """The program of a network in segments; neighbors of which no other segment has the code are one."""
    graph = net.graph.model.graph
    plan = plan_segments(graph, net.graph.weights, True, Recompute(), blocks_joined=1)
    fine = split_program(program, plan.segment_of, plan.count, hands_on_tensors_alone=True)
    structures = [structure_of(segment.code) for segment in fine.segments]
    times = Counter(structures)
    joined, last = list[int](), -1
    for index, structure in enumerate(structures):
        alone = times[structure] == 1
        last += not (index and alone and times[structures[index - 1]] == 1)
        joined.append(last)
    segment_of = {name: joined[segment] for name, segment in plan.segment_of.items()}
    return split_program(program, segment_of, last + 1, hands_on_tensors_alone=True)


class SegmentTracer:
    """Traces the segments of a chain in training mode, on fake tensors.

    Args:
        program: the chain; its first output is the loss.
        weights, states: names of the trained weights and running statistics.
        values: fake tensors of all features, weights, running statistics and constants.
        lowered: what is computed in 16 bits; None: nothing.
        may_be_infinite: gradients may be, before an activation that is clipped.
    """

    def __init__(
        self,
        program: SegmentedProgram,
        weights: Collection[str],
        states: Collection[str],
        values: Mapping[str, torch.Tensor],
        lowered: Lowered | None = None,
        may_be_infinite: bool = False,
    ) -> None:
        self.codes: list[SegmentCode] = []
        self._program = program
        self._loss = program.results[0]
        self._weights, self._states = frozenset(weights), frozenset(states)
        self._values = {name: _leaf(tensor) if name in weights else tensor for name, tensor in values.items()}
        self._numbers: dict[Hashable, int] = {}
        self._lowered = lowered
        self._decompositions = dict(backward_decompositions(may_be_infinite))
        self._given = frozenset(values) - self._states

    def trace(self) -> list[SegmentUse]:
        """The segments in order; `codes` then has what they run."""
        segments = self._program.segments
        # A single segment hands nothing on.
        keys = self._run_forward() if len(segments) > 1 else [None]
        uses, wanted = list[SegmentUse](), set[str]()
        for segment, key in reversed(list(zip(segments, keys, strict=True))):
            if segment.outputs:
                uses.append(self._use(segment, key, wanted))
                wanted.update(uses[-1].gives_gradients_of)
        return uses[::-1]

    def _run_forward(self) -> list[Hashable]:
        """Finds the values that segments hand on; for every segment, what its code does with what it takes."""
        keys, results = list[Hashable](), dict[Hashable, tuple[torch.Tensor, ...]]()
        for segment in self._program.segments:
            names = (*segment.inputs, *segment.tensors)
            given = [self._values[name] for name in names]
            roles = tuple((name in self._weights, name in self._states) for name in names)
            key = structure_of(segment.code), roles, tuple(_described(tensor) for tensor in given)
            if key not in results:
                with _as_traced(), torch.enable_grad():
                    results[key] = self._run(segment, given)
            for name, value in zip(segment.outputs, results[key], strict=True):
                self._values[name] = _leaf(value) if value.requires_grad else value.detach()
            keys.append(key)
        return keys

    def _run(self, segment: Program, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Batch normalization writes its running statistics in place: into copies."""
        count = len(segment.inputs)
        tensors = dict(zip(segment.tensors, given[count:], strict=True))
        copies = {name: tensor.clone() for name, tensor in tensors.items() if name in self._states}
        return self._compute(segment, dict(zip(segment.inputs, given, strict=False)), {**tensors, **copies})

    def _compute(
        self, segment: Program, inputs: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The values that a segment hands on; what goes in from outside of the network is cast first."""
        if self._lowered is None:
            return segment(True, CPU, [inputs[name] for name in segment.inputs], tensors)
        cast = {
            name: self._lowered.cast(name, tensor) if name in self._given else tensor
            for name, tensor in {**inputs, **tensors}.items()
        }
        with self._lowered.computing():
            return segment(True, CPU, [cast[name] for name in segment.inputs], cast)

    def _use(self, segment: Program, key: Hashable, wanted: Collection[str]) -> SegmentUse:
        taken = tuple(name for name in segment.outputs if name in wanted)
        places = tuple(segment.outputs.index(name) for name in taken)
        loss = segment.outputs.index(self._loss) if self._loss in segment.outputs else None
        key = key, places, loss
        if key not in self._numbers:
            self._numbers[key] = len(self.codes)
            self.codes.append(self._trace(segment, taken))
        number = self._numbers[key]
        reads = (*segment.inputs, *segment.tensors)
        leaves = [name for name in reads if self._values[name].requires_grad]
        has_gradient = self.codes[number].has_gradient
        return SegmentUse(
            code=number,
            reads=reads,
            takes_gradients_of=taken,
            gives=(*segment.outputs, *(name for name in segment.tensors if name in self._states)),
            gives_gradients_of=tuple(name for name, has in zip(leaves, has_gradient, strict=True) if has),
        )

    def _trace(self, segment: Program, taken: Sequence[str]) -> SegmentCode:
        """Forward and backward pass of a segment that takes the gradients of some of its values."""
        count, names = len(segment.inputs), (*segment.inputs, *segment.tensors)
        has_gradient: list[bool] = []

        def joint(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = dict(zip(names, arguments, strict=False))
            leaves = {name: _leaf(given[name]) for name in names if self._values[name].requires_grad}
            # Batch normalization writes its running statistics in place: into copies, which are results.
            changed = {name: given[name].clone() for name in segment.tensors if name in self._states}
            given |= leaves | changed
            with torch.enable_grad():
                results = self._compute(segment, {name: given[name] for name in names[:count]}, given)
                found = dict(zip(segment.outputs, results, strict=True))
                ends: dict[str, torch.Tensor | None] = dict(zip(taken, arguments[len(names) :], strict=True))
                if self._loss in found:
                    ends[self._loss] = None
                gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
                if ends and leaves:
                    sources, sides = [found[name] for name in ends], list(leaves.values())
                    gradients = torch.autograd.grad(sources, sides, list(ends.values()), allow_unused=True)
            has_gradient[:] = [gradient is not None for gradient in gradients]
            known = [gradient for gradient in gradients if gradient is not None]
            return (*(result.detach() for result in results), *changed.values(), *known)

        examples = tuple(self._values[name].detach() for name in (*names, *taken))
        tracer = make_fx(joint, decomposition_table=self._decompositions, tracing_mode="symbolic")
        with _as_traced():
            code = _without_copies_of_views(tracer(*examples))
        return SegmentCode(code=code, examples=examples, has_gradient=tuple(has_gradient))


def _without_copies_of_views(code: fx.GraphModule) -> fx.GraphModule:
    """In the steps of scans torch writes `select_copy` for `select` and so on, which exporters do not know."""
    for module in code.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if isinstance(node.target, OpOverload) and torch.Tag.view_copy in node.target.tags:
                    name, _, overload = str(node.target).removeprefix("aten.").partition(".")
                    node.target = getattr(getattr(torch.ops.aten, name.removesuffix("_copy")), overload or "default")
            module.recompile()
    return code


@contextlib.contextmanager
def _as_traced() -> Iterator[None]:
    """With the dispatcher in Python, torch writes some operators out before autograd sees them (resizing, LSTM);
    attention in its mathematical form has a backward pass of matrix products.
    """
    with enable_python_dispatcher(), sdpa_kernel(SDPBackend.MATH):
        yield


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def _described(tensor: torch.Tensor) -> Hashable:
    """What code that was traced on a tensor depends on; sizes that are open are equal if their formulas are."""
    sizes = [str(size) for size in (*tensor.shape, *tensor.stride())]
    return tuple(sizes), tensor.dtype, tensor.requires_grad
