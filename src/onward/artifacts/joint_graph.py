"""Forward and backward pass of a network as one graph of ATen operators, traced on tensors without memory.

Sizes that stay open are symbols of the trace, so that the graph holds for any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)

from onward.artifacts.infinite_derivatives import gradients_may_be_infinite
from onward.artifacts.joint_segments import CPU, SegmentCode, SegmentTracer, SegmentUse, split_into_segments
from onward.artifacts.lowered import Lowered
from onward.errors import ModelError, ParametersError, UserError
from onward.lowering.building.segments import split_program
from onward.lowering.building.specialization import fold_constants, specialize
from onward.lowering.module import OnnxModule

_DATA_DEPENDENT = (DataDependentOutputException, GuardOnDataDependentSymNode)
_EXAMPLE_SIZES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
"""Stand for the sizes that stay open; all different, so that none is taken for another."""


@dataclass(frozen=True)
class OpenSizes:
    """The inputs of a network with the sizes they are traced with.

    Attributes:
        shapes: input -> its axes: a number, or the name of a size that stays open.
        examples: size that stays open -> the number that stands for it in the trace.
    """

    shapes: Mapping[str, tuple[int | str, ...]]
    examples: Mapping[str, int]

    def example(self, name: str) -> tuple[int, ...]:
        """The shape of an input in the trace."""
        return tuple(self.examples[size] if isinstance(size, str) else size for size in self.shapes[name])

    def with_one_batch(self) -> OpenSizes:
        """The same inputs, the open sizes of all first axes being one: exporters may name each input's batch anew."""
        batches = dict.fromkeys(shape[0] for shape in self.shapes.values() if shape and isinstance(shape[0], str))
        names: dict[int | str, int | str] = {batch: next(iter(batches)) for batch in batches}
        shapes = {name: tuple(names.get(size, size) for size in shape) for name, shape in self.shapes.items()}
        left = {size for shape in shapes.values() for size in shape}
        return OpenSizes(shapes, {name: number for name, number in self.examples.items() if name in left})


@dataclass(frozen=True, kw_only=True)
class JointGraph:
    """Loss and gradients as a function of features, weights, running statistics and constants.

    Attributes:
        codes: forward and backward pass of segments, those of equal ones once.
        uses: the segments in order.
        loss: the value that is minimized.
        features, weights, states: names of the inputs.
        constants: the other inputs by name, with their values.
        sizes: of the features.
    """

    codes: Sequence[SegmentCode]
    uses: Sequence[SegmentUse]
    loss: str
    features: tuple[str, ...]
    weights: tuple[str, ...]
    states: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    sizes: OpenSizes

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of everything that goes in, in order."""
        return (*self.features, *self.weights, *self.states, *self.constants)


def open_sizes(net: OnnxModule, sizes: Mapping[str, int]) -> OpenSizes:
    """Which sizes of the inputs are fixed and which stay open.

    Args:
        net: whose program names its inputs.
        sizes: symbolic dimension -> its size; those that are not in it stay open.

    Raises:
        ParametersError: a name is no symbolic dimension of the inputs.
        ModelError: an input has no shape.
    """
    shapes: dict[str, tuple[int | str, ...]] = {}
    for name in net.program.inputs:
        if name not in net.input_shapes:
            raise ModelError(f"input {name!r} has no known rank; a training graph needs the shape of every input.")
        axes = enumerate(net.input_shapes[name])
        named = [f"{name}_axis_{axis}" if size == "?" else size for axis, size in axes]
        shapes[name] = tuple(sizes.get(size, size) if isinstance(size, str) else size for size in named)
    known = {size for shape in net.input_shapes.values() for size in shape if isinstance(size, str)}
    for name in sizes:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ParametersError(f"{name!r} is no symbolic dimension of the model's inputs; they have: {listed}.")
    _name_batch_of_labels(shapes, () if net.graph.loss_names is None else net.graph.loss_names.labels)
    symbols = dict.fromkeys(size for shape in shapes.values() for size in shape if isinstance(size, str))
    if len(symbols) > len(_EXAMPLE_SIZES):
        raise ModelError(
            f"{len(symbols)} sizes are open ({', '.join(symbols)}); give some of them in mapped_dimensions."
        )
    return OpenSizes(shapes, dict(zip(symbols, _EXAMPLE_SIZES, strict=False)))


def _name_batch_of_labels(shapes: dict[str, tuple[int | str, ...]], labels: Collection[str]) -> None:
    """The first axis of a label is the batch, whatever an exporter named the first axis of the outputs."""
    features = [shape for name, shape in shapes.items() if name not in labels and shape]
    known = {size for shape in features for size in shape}
    for label in labels:
        shape = shapes.get(label)
        if features and shape and isinstance(shape[0], str) and shape[0] not in known:
            shapes[label] = (features[0][0], *shape[1:])


def trace_joint_graph(
    net: OnnxModule, sizes: Mapping[str, int] | None = None, lowered: Lowered | None = None
) -> JointGraph:
    """Traces the loss of a network and its gradients, in training mode.

    Args:
        net: whose first output is the loss, of rank 0; its weights are only looked at.
        sizes: symbolic dimension -> its size; those that are not in it stay open. Where the network needs it, those
            of all first axes are one, the batch.
        lowered: what it computes in 16 bits; None: in the types of the network.

    Raises:
        ModelError: a size that should stay open decides what is computed, or the model's shapes depend on its data.
    """
    opened = open_sizes(net, sizes or {})
    try:
        return _trace(net, opened, lowered)
    except ModelError:
        joined = opened.with_one_batch()
        if joined == opened:
            raise
        with contextlib.suppress(ModelError):
            return _trace(net, joined, lowered)
        raise


def _trace(net: OnnxModule, opened: OpenSizes, lowered: Lowered | None) -> JointGraph:
    """As `trace_joint_graph`, with these sizes open."""
    weights, states = tuple(net.graph.weights), tuple(net.graph.states)
    own = net.tensors_by_name()
    program = net.program
    on_cpu = {name: program.tensor(name, own).detach().to(CPU) for name in program.tensors}
    constant = frozenset(on_cpu) - {*weights, *states}
    if opened.examples:
        program = fold_constants(program, CPU, on_cpu, constant)
    else:
        examples = [_example(net, name, opened) for name in program.inputs]
        program = specialize(program, CPU, examples, on_cpu, constant)
    learned = {*weights, *states}
    constants = {n: program.tensor(n, own).detach().to(CPU) for n in program.tensors if n not in learned}
    if lowered is not None:
        constants = {name: lowered.constant(name, tensor) for name, tensor in constants.items()}
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    features = {name: _fake_feature(mode, net, name, opened) for name in program.inputs}
    with mode:
        kept = {name: _empty_like(own[name]) for name in (*weights, *states)}
        kept |= {name: _empty_like(tensor) for name, tensor in constants.items()}
    given = {**features, **kept}
    may_be_infinite = gradients_may_be_infinite(net.graph.model, lowered is not None)
    with _explaining(opened), mode:
        chain = split_into_segments(net, program)
        tracer = SegmentTracer(chain, weights, states, given, lowered, may_be_infinite)
        uses = tracer.trace()
        if len(uses) > 1 and any(code.has_loops for code in tracer.codes):
            # What a loop hands on may have sizes that are known to it alone.
            chain = split_program(program, {}, 1)
            tracer = SegmentTracer(chain, weights, states, given, lowered, may_be_infinite)
            uses = tracer.trace()
    _check_open(mode, features, opened)
    reached = {name for use in uses for name in use.gives_gradients_of}
    unreached = [name for name in weights if name not in reached]
    if unreached:
        raise ModelError(
            f"no gradient of the loss reaches {', '.join(map(repr, unreached))}; list them in weights_not_to_train."
        )
    return JointGraph(
        codes=tracer.codes,
        uses=uses,
        loss=chain.results[0],
        features=tuple(program.inputs),
        weights=weights,
        states=states,
        constants=constants,
        sizes=opened,
    )


def tensors_of(net: OnnxModule, joint: JointGraph) -> dict[str, torch.Tensor]:
    """The present values of weights, running statistics and constants, on the CPU."""
    own = net.tensors_by_name()
    return {name: own[name].detach().to(CPU) for name in (*joint.weights, *joint.states)} | dict(joint.constants)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _example(net: OnnxModule, name: str, sizes: OpenSizes) -> torch.Tensor:
    return torch.zeros(sizes.example(name), dtype=net.input_dtypes[name])


def _fake_feature(mode: FakeTensorMode, net: OnnxModule, name: str, sizes: OpenSizes) -> torch.Tensor:
    kinds = [DimDynamic.DYNAMIC if isinstance(size, str) else DimDynamic.STATIC for size in sizes.shapes[name]]
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(_example(net, name, sizes), symbolic_context=context)


@contextlib.contextmanager
def _explaining(sizes: OpenSizes) -> Iterator[None]:
    """Says what a failure of the tracer means for the user."""
    try:
        yield
    except (*_DATA_DEPENDENT, UserError) as error:
        if isinstance(error, _DATA_DEPENDENT) or isinstance(error.__cause__, _DATA_DEPENDENT):
            raise ModelError(
                "the model computes shapes or control flow from its data, so it has no static training graph: "
                f"{_first_line(error)}"
            ) from error
        if sizes.examples:
            given = ", ".join(f"{name}={size}" for name, size in sizes.examples.items())
            raise ModelError(
                f"the training graph cannot be traced with the symbolic dimensions {given}: {_first_line(error)} "
                "Set the sizes that the model needs in training.mapped_dimensions."
            ) from error
        raise


def _first_line(error: Exception) -> str:
    """Without the advice that torch appends for whoever wrote the network in Python."""
    return str(error).strip().split("\n", 1)[0]


def _check_open(mode: FakeTensorMode, features: Mapping[str, torch.Tensor], sizes: OpenSizes) -> None:
    """Every open size is still a symbol, and one of its own."""
    environment = mode.shape_env
    assert environment is not None
    fixed = set()
    for name, tensor in features.items():
        for axis, size in enumerate(sizes.shapes[name]):
            traced: Any = tensor.shape[axis]
            if isinstance(size, str) and not environment.replace(traced.node.expr).is_symbol:
                fixed.add(size)
    if fixed:
        listed = ", ".join(f"{name!r}" for name in sorted(fixed))
        raise ModelError(
            f"the training graph cannot leave {listed} open: the model computes differently for every size (a loop "
            "over it, or a comparison with it). Set its size in training.mapped_dimensions."
        )
