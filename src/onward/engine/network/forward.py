"""One forward pass of the network: inputs in, named values out, through the program that fits their shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from onward.engine.inputs.features import FeatureReader
from onward.engine.inputs.index_ranges import FeatureRange
from onward.engine.network.network import Network, Pass
from onward.engine.network.precision import Precision
from onward.graph.distillation.adding import PREFIX as TEACHER
from onward.lowering.building.segments import SegmentedProgram, run_segments, split_program
from onward.lowering.building.specialization import specialize
from onward.lowering.kernels.joint_casts import cast_together
from onward.lowering.kernels.rematerialize import with_rematerialization
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program
from onward.lowering.rewriting.direct_calls import with_direct_calls
from onward.lowering.rewriting.exact_nodes import with_exact_nodes
from onward.lowering.rewriting.frozen_weights import with_frozen_weights
from onward.lowering.rewriting.recomputed_inputs import with_linear_layers
from onward.lowering.rewriting.sparse_lookups import with_sparse_lookups
from onward.lowering.rewriting.unbound_slices import with_unbound_slices

MOST_SPECIALIZED_SHAPES = 8
"""After this many different batch shapes the general program is used: such data vary at every step."""


class Forward:
    """Calls a network on batches, in a precision, with a specialized program for each batch shape.

    Args:
        network: where the weights live.
        outputs: names of the values to compute, in order.
        precision: of the pass.
        graph_net: where the graph of the pass comes from, if not from the network's own (a separate evaluation graph
            whose weights are found in the network by name).
        dimensions: sizes that symbolic dimensions of the inputs must have.
        feature_ranges: features that are class labels or pick rows -> which there are.
        instrument: gives the program to call instead of one (a profiler's twin).
        module: what is called instead of `network`: the same, wrapped by an engine that reduces gradients.
        exact: inputs that mixed precision leaves as they are: activations of an earlier stage.
        note_cast: called with each weight that a pass casts, and the result.
    """

    def __init__(
        self,
        network: Network,
        outputs: Sequence[str],
        precision: Precision,
        graph_net: OnnxModule | None = None,
        dimensions: Mapping[str, int] | None = None,
        feature_ranges: Mapping[str, FeatureRange] | None = None,
        instrument: Callable[[Program], Program] | None = None,
        module: nn.Module | None = None,
        exact: Sequence[str] = (),
        note_cast: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        net = network.net
        owner = net if graph_net is None else graph_net
        self.net = net
        self.network = network
        self.outputs = tuple(outputs)
        self.precision = precision
        self.module: nn.Module = network if module is None else module
        self._is_separate = graph_net is not None
        self._instrument, self._note_cast = instrument, note_cast
        loss = owner.graph.loss_names
        own, shared = owner.tensors_by_name(), net.tensors_by_name()
        program, features = owner.program_for(self.outputs), tuple[str, ...]()
        if owner.graph.teacher_weights and precision != Precision(None):
            labels = () if loss is None else loss.labels
            program, features = with_exact_nodes(program, TEACHER, exact, labels, precision.lower)
        self.program = precision.program(program, own)
        states = {*owner.graph.states}
        self._weights = frozenset(owner.graph.weights)
        self._changing = self._weights | states
        self._frozen, self._scales = owner.frozen.weights, owner.frozen.scales
        # What the loss compares with and weighs by keeps its digits: losses are computed in fp32. So do scales.
        of_loss = () if loss is None else (*loss.labels, *loss.constants)
        self._exact = frozenset((*exact, *features, *of_loss, *self._scales, *owner.graph.exact_weights))
        self._tensors = {
            name: shared[name] if name in states else self._lower_unless_exact(name, own[name])
            for name in self.program.tensors
            if name in own and name not in self._weights
        }
        self._constants = frozenset(self._tensors) - states - self._frozen
        self._specialized: dict[tuple[Any, ...], SegmentedProgram] = {}
        self._general: SegmentedProgram | None = None
        self._graph_dtypes = net.graph_dtypes
        self._casts_nothing = precision == Precision(None) and not net.graph_dtypes and note_cast is None
        self.reader = FeatureReader(owner.graph, self.program.inputs, net.device, dimensions, feature_ranges)

    def __call__(self, features: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The outputs by name; the network's training mode decides on dropout and batch statistics."""
        inputs = {name: features[name] for name in self.program.inputs}
        device = self.net.device
        with self.precision.autocast(device):
            program = self._program_for(tuple(inputs.values()), device)
            if self._instrument is not None:
                program = replace(program, segments=tuple(self._instrument(code) for code in program.segments))
            run = Pass(program, self.network.training, device, self._tensors, self.cast)
            lowered = {name: self._lower_unless_exact(name, value) for name, value in inputs.items()}
            if self._is_separate:
                weights = self.cast({name: self.net.weights[name] for name in self._weights})
                results = run_segments(program, run.training, device, lowered, {**weights, **self._tensors})
            else:
                results = self.module(run, lowered)
        return dict(zip(self.outputs, results, strict=True))

    def cast(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights by name as the pass computes with them: in the graph's own types, or in that of mixed precision."""
        if self._casts_nothing:
            return dict(weights)
        lowered: dict[str, torch.Tensor] = {}
        by_type: dict[torch.dtype, dict[str, torch.Tensor]] = {}
        for name, weight in weights.items():
            dtype = self._graph_dtypes.get(name)
            if dtype is None and weight.requires_grad and name not in self._exact:
                dtype = self.precision.type_of(weight)
            if dtype is None:
                lowered[name] = self._lower_unless_exact(name, weight)
            else:
                by_type.setdefault(dtype, {})[name] = weight
        for dtype, together in by_type.items():
            lowered |= zip(together, cast_together(tuple(together.values()), dtype), strict=True)
        if self._note_cast is not None:
            for name, weight in weights.items():
                self._note_cast(weight, lowered[name])
        return lowered

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """What a pass reads besides weights and inputs, in the type that it computes with."""
        return (*self._tensors.values(), *self.program.attribute_tensors.values())

    @property
    def frozen(self) -> tuple[torch.Tensor, ...]:
        """The frozen weights among the constants, and their scales."""
        return tuple(self._tensors[name] for name in self._frozen | self._scales if name in self._tensors)

    def specialize(self, inputs: Sequence[torch.Tensor]) -> SegmentedProgram:
        """The segments for inputs of these shapes, in the order of the program; made at their first use."""
        with self.precision.autocast(self.net.device):
            return self._program_for(tuple(inputs), self.net.device)

    def _lower_unless_exact(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.precision.dtype is None or name in self._exact else self.precision.lower(tensor)

    def _program_for(self, inputs: tuple[torch.Tensor, ...], device: torch.device) -> SegmentedProgram:
        key = (str(device), *((tuple(i.shape), i.dtype) for i in inputs))
        if key not in self._specialized:
            if len(self._specialized) >= MOST_SPECIALIZED_SHAPES:
                if self._general is None:
                    self._general = self._keeping_less(self._split(self.program))
                return self._general
            names = zip(self.program.inputs, inputs, strict=True)
            lowered = tuple(self._lower_unless_exact(name, value) for name, value in names)
            examples = {**self._tensors, **self._example_weights()}
            program = specialize(self.program, device, lowered, examples, self._constants)
            self._specialized[key] = self._compiled(self._split(program), device)
        return self._specialized[key]

    def _example_weights(self) -> dict[str, torch.Tensor]:
        """Tensors of one number's memory, of the shapes and types that all weights have in the pass."""
        weights = {name: self.net.weights[name] for name in self._weights}
        numbers = self.cast(
            {name: torch.empty((), dtype=w.dtype, device=self.net.device) for name, w in weights.items()}
        )
        examples = {name: numbers[name].expand(weight.shape) for name, weight in weights.items()}
        for name in self._frozen & self._tensors.keys():
            frozen = self._tensors[name]
            examples[name] = torch.empty((), dtype=frozen.dtype, device=frozen.device).expand(frozen.shape)
        return examples

    def _compiled(self, program: SegmentedProgram, device: torch.device) -> SegmentedProgram:
        compilation = self.network.compilation
        return self._keeping_less(program) if compilation is None else compilation.of_segments(program, device)

    def _keeping_less(self, program: SegmentedProgram) -> SegmentedProgram:
        """The program, whose segments leave out of memory what can be recomputed; those recomputed entirely stay."""
        if self._is_separate:
            return program
        recomputed, how = self.network.plan.recomputed, self.network.linear_layers

        def keeping_less(segment: Program) -> Program:
            segment = with_unbound_slices(with_linear_layers(segment, *how))
            if self.precision == Precision(None):
                segment = with_direct_calls(segment)
            return with_rematerialization(segment) if how.recomputes_inputs else segment

        segments = (s if i in recomputed else keeping_less(s) for i, s in enumerate(program.segments))
        return replace(program, segments=tuple(segments))

    def _split(self, program: Program) -> SegmentedProgram:
        if self.network.compilation is None:  # a compiler chooses what it keeps by itself
            program = with_frozen_weights(program, self._frozen, self._changing)
        if self._is_separate:
            return split_program(program, {}, 1)
        return self.network.split(with_sparse_lookups(program) if self.network.sparse_lookups else program)
