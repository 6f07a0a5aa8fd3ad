"""One forward pass of the network: features in, named values out, through the program that fits the batch's shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from onward.data.shard import FeatureSpec
from onward.engine.network import Network, Pass
from onward.engine.precision import Precision
from onward.errors import DataError
from onward.lowering.dtypes import tensor_from_array
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program
from onward.lowering.segments import SegmentedProgram, run_segments, split_program
from onward.lowering.specialization import specialize

MOST_SPECIALIZED_SHAPES = 8
"""After this many different batch shapes the general program is used: such data vary at every step."""


@dataclass(frozen=True)
class LabelRange:
    """Which class labels there are: 0 to `classes` - 1, and one that does not count."""

    classes: int
    ignored: int | None = None

    def check(self, name: str, labels: np.ndarray) -> None:
        """Checks a feature of a batch here, where its numbers still are at hand: a GPU would stop without a word.

        Raises:
            DataError: a label is out of range, with its place and how many there are.
        """
        outside = (labels < 0) | (labels >= self.classes)
        if self.ignored is not None:
            outside &= labels != self.ignored
        if outside.any():
            place = tuple(int(index) for index in np.argwhere(outside)[0])
            ignored = "" if self.ignored is None else f" or {self.ignored}, which does not count"
            raise DataError(
                f"feature {name!r} holds the label {labels[place]}; expected 0 to {self.classes - 1}{ignored}, since "
                f"the model has {self.classes} classes. {int(outside.sum())} of the {labels.size} labels of this batch "
                f"are out of range, the first at {list(place)} (sample first). Mend the data, or set loss.ignore_index."
            )


class Forward:
    """Calls a network on batches, in a precision, with a specialized program for each batch shape.

    Args:
        network: where the weights live.
        outputs: names of the values to compute, in order.
        precision: of the pass.
        graph_net: where the graph of the pass comes from, if not from the network's own (a separate evaluation graph
            whose weights are found in the network by name).
        dimensions: sizes that symbolic dimensions of the inputs must have.
        label_ranges: features that are class labels -> which there are.
        instrument: gives the program to call in the place of one (a profiler's twin).
        module: what is called in the place of `network`: the same, wrapped by an engine that reduces gradients.
    """

    def __init__(
        self,
        network: Network,
        outputs: Sequence[str],
        precision: Precision,
        graph_net: OnnxModule | None = None,
        dimensions: Mapping[str, int] | None = None,
        label_ranges: Mapping[str, LabelRange] | None = None,
        instrument: Callable[[Program], Program] | None = None,
        module: nn.Module | None = None,
    ) -> None:
        net = network.net
        owner = net if graph_net is None else graph_net
        self.net = net
        self.network = network
        self.outputs = tuple(outputs)
        self.precision = precision
        self.module: nn.Module = network if module is None else module
        self._is_separate = graph_net is not None
        self._instrument = instrument
        self._label_ranges = label_ranges or {}
        self.program = owner.program_for(self.outputs)
        loss = owner.graph.loss_names
        # What the loss compares with and weighs by keeps its digits: losses are computed in fp32.
        self._exact = frozenset() if loss is None else frozenset((*loss.labels, *loss.constants))
        own, shared = owner.tensors_by_name(), net.tensors_by_name()
        states = {*owner.graph.states}
        self._weights = frozenset(owner.graph.weights)
        self._tensors = {
            name: shared[name] if name in states else self._lower_unless_exact(name, own[name])
            for name in self.program.tensors
            if name in own and name not in self._weights
        }
        self._constants = frozenset(name for name in self._tensors if name not in states)
        self._specialized: dict[tuple[Any, ...], SegmentedProgram] = {}
        self._general: SegmentedProgram | None = None
        self._graph_dtypes = net.graph_dtypes
        self._input_dtypes = owner.input_dtypes
        sizes = dimensions or {}
        self._input_shapes = {
            name: tuple(sizes.get(size, size) if isinstance(size, str) else size for size in shape)
            for name, shape in owner.input_shapes.items()
        }

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the features that the pass reads."""
        return self.program.inputs

    def __call__(self, features: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The outputs by name; the network's training mode decides on dropout and batch statistics."""
        inputs = {name: features[name] for name in self.program.inputs}
        device = self.net.device
        with self.precision.autocast(device):
            program = self._program_for(tuple(inputs.values()), device)
            if self._instrument is not None:
                program = replace(program, segments=tuple(self._instrument(code) for code in program.segments))
            run = Pass(program, self.net.training, device, self._tensors, self.cast)
            lowered = {name: self._lower_unless_exact(name, value) for name, value in inputs.items()}
            if self._is_separate:
                weights = {name: self.cast(name, self.net.weights[name]) for name in self._weights}
                results = run_segments(program, run.training, device, lowered, {**weights, **self._tensors})
            else:
                results = self.module(run, lowered)
        return dict(zip(self.outputs, results, strict=True))

    def cast(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A weight as the pass computes with it: in the graph's own type, or in that of mixed precision."""
        dtype = self._graph_dtypes.get(name)
        return self.precision.lower(weight) if dtype is None else weight.to(dtype)

    def _lower_unless_exact(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if name in self._exact else self.precision.lower(tensor)

    def _program_for(self, inputs: tuple[torch.Tensor, ...], device: torch.device) -> SegmentedProgram:
        key = (str(device), *((tuple(i.shape), i.dtype) for i in inputs))
        if key not in self._specialized:
            if len(self._specialized) >= MOST_SPECIALIZED_SHAPES:
                if self._general is None:
                    self._general = self._split(self.program)
                return self._general
            names = zip(self.program.inputs, inputs, strict=True)
            lowered = tuple(self._lower_unless_exact(name, value) for name, value in names)
            examples = {**self._example_weights(), **self._tensors}
            program = specialize(self.program, device, lowered, examples, self._constants)
            self._specialized[key] = self._split(program)
        return self._specialized[key]

    def _example_weights(self) -> dict[str, torch.Tensor]:
        """Tensors of one number's memory, of the shapes and types that the weights have in the pass."""
        examples = {}
        for name in self._weights:
            weight = self.net.weights[name]
            example = self.cast(name, torch.empty((), dtype=weight.dtype, device=self.net.device))
            examples[name] = example.expand(weight.shape)
        return examples

    def _split(self, program: Program) -> SegmentedProgram:
        return split_program(program, {}, 1) if self._is_separate else self.network.split(program)

    def to_tensors(self, features: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Features of a batch (numpy arrays, batch axis first) as tensors on the network's device.

        Raises:
            DataError: a feature is missing, its type or shape does not fit the model's input, or a label is out of
                range.
        """
        self._check_names(features)
        device = self.net.device
        return {name: self._to_tensor(name, features[name], device) for name in self.program.inputs}

    def _to_tensor(self, name: str, array: Any, device: torch.device) -> torch.Tensor:
        tensor = array if isinstance(array, torch.Tensor) else tensor_from_array(array)
        self._check_type(name, tensor.dtype)
        self._check_shape(name, tuple(tensor.shape))
        tensor = tensor.to(self._input_dtypes.get(name, tensor.dtype))
        if name in self._label_ranges and tensor.device.type == "cpu":
            self._label_ranges[name].check(name, tensor.numpy())
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    def check_specs(self, specs: Mapping[str, FeatureSpec]) -> None:
        """Checks what a source of data says of its samples, before any of them is computed.

        Raises:
            DataError: a feature is missing, or its type or shape does not fit the model's input.
        """
        self._check_names(specs)
        for name in self.program.inputs:
            self._check_type(name, tensor_from_array(np.empty(0, specs[name].dtype)).dtype)
            expected = self._input_shapes.get(name)
            batch = expected[0] if expected else 1
            self._check_shape(name, (batch if isinstance(batch, int) else 1, *specs[name].shape))

    def _check_names(self, given: Mapping[str, Any]) -> None:
        missing = [name for name in self.program.inputs if name not in given]
        if missing:
            raise DataError(
                f"the data lack {', '.join(map(repr, missing))}, which the model reads; they hold "
                f"{', '.join(map(repr, given))}. Name them in data.input_name_map (name in the file: name in the "
                "model)."
            )

    def _check_type(self, name: str, found: torch.dtype) -> None:
        expected = self._input_dtypes.get(name, found)
        if found == expected:
            return
        if not torch.can_cast(found, expected) or (expected == torch.bool) != (found == torch.bool):
            raise DataError(
                f"feature {name!r} is {_short(found)} in the data; the model expects {_short(expected)}. "
                "Pack the data again with that type."
            )

    def _check_shape(self, name: str, found: tuple[int, ...]) -> None:
        expected = self._input_shapes.get(name)
        if expected is not None and not _fits(found, expected):
            raise DataError(
                f"feature {name!r} has shape {list(found)} (batch axis first); the model expects "
                f"[{', '.join(str(size) for size in expected)}]."
            )


def _fits(shape: tuple[int, ...], expected: tuple[int | str, ...]) -> bool:
    """Whether a shape has the rank and the fixed sizes that are expected."""
    return len(shape) == len(expected) and all(
        isinstance(want, str) or size == want for size, want in zip(shape, expected, strict=True)
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
