"""The weights of a rank as torch modules, a module for every segment of the graph, and how a pass runs through them.

Modules hold the weights, since torch's engines for several processes shard and reduce by module; the code that a
segment runs comes with each pass, so that training and evaluation use the same weights in the same place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onward.engine.network.compilation import Compilation
from onward.lowering.building.segments import SegmentedProgram, run_chain, split_program
from onward.lowering.module import OnnxModule, TensorTree
from onward.lowering.passes import Recomputation
from onward.lowering.program import Program
from onward.plan.costs.segments import SegmentPlan


class Pass:
    """What one pass through the network runs.

    No dataclass: torch's engines look into those for tensors, all of the program included, before every segment.

    Attributes:
        program: the code of every segment.
        training: whether dropout and batch statistics are on.
        device: where it runs.
        tensors: all that the code reads and that is no weight of the network: constants, running statistics.
        cast: name -> weight to name -> the weight as the pass computes with it.
    """

    def __init__(
        self,
        program: SegmentedProgram,
        training: bool,
        device: torch.device,
        tensors: Mapping[str, torch.Tensor],
        cast: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]],
    ) -> None:
        self.program = program
        self.training = training
        self.device = device
        self.tensors = tensors
        self.cast = cast

    def run(self, segment: int, weights: Mapping[str, torch.Tensor], values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Runs the code of a segment; weights that it does not read are left alone."""
        code = self.program.segments[segment]
        read = {name: self.tensors[name] for name in code.tensors if name in self.tensors}
        read |= self.cast({name: weights[name] for name in code.tensors if name in weights})
        return code(self.training, self.device, values, read)


class LinearOptions(NamedTuple):
    """How linear layers compute.

    Attributes:
        recomputes_inputs: norms and activations that they read are recomputed for their weights' gradients; on a CPU
            also what follows a batch normalization.
        joins: those that read the same are one function.
    """

    recomputes_inputs: bool
    joins: bool


DEFAULT_LINEAR_OPTIONS = LinearOptions(recomputes_inputs=False, joins=False)


class Segment(TensorTree):
    """The weights that only one segment reads."""

    def __init__(self, is_recomputed: bool) -> None:
        super().__init__()
        self.is_recomputed = is_recomputed
        self.weight_names: list[str] = []
        self._homes: dict[str, tuple[nn.Module, str]] = {}

    def adopt_parameter(self, net: OnnxModule, name: str) -> None:
        """Takes a weight of `net` over."""
        net.weights.move(name, self)
        self.weight_names.append(name)
        self._homes[name] = self._holder(name)

    def _own(self, name: str) -> torch.Tensor:
        """A weight, by the module that held it first; where it is there no more, by its name."""
        holder, leaf = self._homes[name]
        found = holder._parameters.get(leaf)
        return self.find_parameter(name) if found is None else found

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Its weights by name, as they are now."""
        return {name: self._own(name) for name in self.weight_names}

    def forward(self, run: Pass, index: int, shared: Mapping[str, torch.Tensor], *values: Any) -> tuple[Any, ...]:
        """Runs the code of this segment in a pass; `shared` holds weights that other segments read, too."""

        def compute(*values: Any) -> tuple[Any, ...]:
            return run.run(index, {**shared, **self.own_weights()}, values)

        if not (self.is_recomputed and run.training and torch.is_grad_enabled()):
            return compute(*values)
        return checkpoint(  # type: ignore[no-any-return]
            compute, *values, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), Recomputation())
        )


class Network(nn.Module):
    """All weights that a rank trains, or those of one of its pipeline stages, in segments.

    Args:
        net: whose weights move here; it still finds them by name.
        plan: which node, and so which weight, belongs to which segment.
        compilation: what compiles the code of passes; None: they run as they are.
        linear_layers: how they compute where code is not compiled.
        sparse_lookups: whether lookups in a table that the last layer reads, too, have sparse gradients.
    """

    net: OnnxModule

    def __init__(
        self,
        net: OnnxModule,
        plan: SegmentPlan,
        compilation: Compilation | None = None,
        linear_layers: LinearOptions = DEFAULT_LINEAR_OPTIONS,
        sparse_lookups: bool = False,
    ) -> None:
        super().__init__()
        self.compilation = compilation
        self.linear_layers = linear_layers
        self.sparse_lookups = sparse_lookups
        self.__dict__["net"] = net  # not as a child: its constants are not this module's to reduce or shard
        self.plan = plan
        self.segments = nn.ModuleList(Segment(index in plan.recomputed) for index in range(plan.count))
        self.shared = Segment(is_recomputed=False)
        self.train(net.training)
        for name, segments in plan.readers.items():
            home = self.segments[segments[0]] if len(segments) == 1 else self.shared
            assert isinstance(home, Segment)
            home.adopt_parameter(net, name)

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        """All weights by name."""
        return self.net.weights

    @property
    def units(self) -> list[tuple[list[nn.Module], bool]]:
        """Modules whose weights ZeRO communicates together, and whether these stay until the backward pass."""
        return [([self.segments[index] for index in unit.segments], unit.is_kept) for unit in self.plan.units]

    def split(self, program: Program) -> SegmentedProgram:
        """A program of this network in its segments."""
        return split_program(program, self.plan.segment_of, self.plan.count)

    def forward(self, run: Pass, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The outputs of the pass, in order."""
        program = run.program
        # Not a dict: the engine of ZeRO would take these weights, of its root, for inputs of every segment, and add
        # zeros to their gradients there.
        shared = MappingProxyType(self.shared.own_weights())
        values = run_chain(program, inputs, lambda index, given: self.segments[index](run, index, shared, *given))
        return tuple(self._result(run, name, values) for name in program.results)

    def _result(self, run: Pass, name: str, values: Mapping[str, Any]) -> Any:
        if name in values:
            return values[name]
        if name in run.tensors:
            return run.tensors[name]
        for home in (self.shared, *self.segments):
            assert isinstance(home, Segment)
            if name in home.weight_names:
                return run.cast({name: home.find_parameter(name)})[name]
        raise KeyError(name)


def unsplit_network(net: OnnxModule) -> Network:
    """A network that is not cut."""
    return Network(
        net, SegmentPlan(count=1, segment_of={}, readers=dict.fromkeys(net.graph.weights, (0,)), recomputed=frozenset())
    )
