"""Runs the standard's own training (`TrainingInfoProto`, ONNX IR version 7 and newer): initialization and steps.

A step computes inference graph and algorithm together and then assigns what the update bindings say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir
import torch

from onward.errors import ModelError
from onward.graph.training_graph import TrainingGraph
from onward.graph.training_info import TrainingAlgorithm, read_training_algorithms
from onward.lowering.kernels.dtypes import tensor_from_ir
from onward.lowering.module import OnnxModule
from onward.parameters.limits import DEFAULT_LIMITS, Limits


class TrainingInfo:
    """The training that a model carries, and the present values of what it changes.

    Attributes:
        variables: mutable variable -> its value: weights of the model, moments and counters of its algorithms.
        inputs: what `step` must be given.
        outputs: what `step` gives.
    """

    def __init__(self, algorithms: tuple[TrainingAlgorithm, ...], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._algorithms = algorithms
        self._stored: list[dict[str, torch.Tensor]] = []
        self._steps: list[OnnxModule] = []
        self.variables: dict[str, torch.Tensor] = {}
        changed = {name for one in algorithms for name in one.variables}
        for one in algorithms:
            stored = {n: tensor_from_ir(t, f"initializer {n!r}").to(self.device) for n, t in one.stored.items()}
            self.variables.update({n: t for n, t in stored.items() if n in changed})
            self._stored.append({n: t for n, t in stored.items() if n not in changed})
            outputs = tuple(dict.fromkeys((*one.outputs, *one.updates.values())))
            self._steps.append(_network(one.step, outputs).to(self.device).train())
        known = {name for one in algorithms for name in one.stored}
        self.inputs = tuple(
            dict.fromkeys(name for step in self._steps for name in step.program.inputs if name not in known)
        )
        self.outputs = tuple(dict.fromkeys(name for one in algorithms for name in one.outputs))

    def initialize(self) -> None:
        """Executes every initialization graph and assigns what its bindings say.

        Raises:
            ModelError: a value does not have its variable's shape or type.
        """
        for one in self._algorithms:
            if one.initialization is None:
                continue
            outputs = tuple(dict.fromkeys(one.first_values.values()))
            with torch.no_grad():
                values = _call(_network(one.initialization, outputs).to(self.device), outputs, {})
            self._assign(one.first_values, values)

    def step(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """One training iteration: every algorithm, each followed by its assignments.

        Args:
            inputs: value of every name in `self.inputs`; an input of an algorithm that has an initializer may be left
                out, or given to overrule it.

        Returns:
            The outputs of the algorithms and of the model, by name, computed before the assignments.

        Raises:
            ModelError: an input is missing, unknown or of the wrong type, or a new value does not fit its variable.
        """
        self._check_given(inputs)
        results: dict[str, torch.Tensor] = {}
        for one, net, stored in zip(self._algorithms, self._steps, self._stored, strict=True):
            known = {**stored, **self.variables, **inputs}
            with torch.no_grad():
                values = _call(net, net.program.outputs, {n: known[n] for n in net.program.inputs if n in known})
            results.update({name: values[name] for name in one.outputs})
            self._assign(one.updates, values)
        return results

    def _check_given(self, inputs: Mapping[str, Any]) -> None:
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise ModelError(f"a step takes {', '.join(self.inputs)}; missing: {', '.join(missing)}.")
        allowed = {name for step in self._steps for name in step.program.inputs} - self.variables.keys()
        unknown = [name for name in inputs if name not in allowed]
        if unknown:
            raise ModelError(f"a step has no input {unknown[0]!r}; it takes {', '.join(self.inputs) or 'none'}.")

    def _assign(self, bindings: Mapping[str, str], values: Mapping[str, torch.Tensor]) -> None:
        for variable, source in bindings.items():
            old, new = self.variables[variable], values[source]
            if old.shape != new.shape or old.dtype != new.dtype:
                raise ModelError(
                    f"training_info assigns {source!r}, {_described(new)}, to {variable!r}, which is {_described(old)}."
                )
        self.variables.update({variable: values[source].detach() for variable, source in bindings.items()})


def load_training_info(
    model: str | os.PathLike[str] | onnx.ModelProto,
    device: torch.device | str = "cpu",
    limits: Limits = DEFAULT_LIMITS,
) -> TrainingInfo:
    """Reads the training that a model carries in its `training_info`, as the standard's `TrainingInfoProto` says.

    Variables have their stored values; `initialize()` gives them those of the initialization graphs.

    Raises:
        ModelError: the model is broken or carries no `training_info`, or a binding names what does not exist.
        OperatorError: operators without a lowering, all of them, with node names.
    """
    return TrainingInfo(read_training_algorithms(model, limits), device)


def _network(model: ir.Model, outputs: tuple[str, ...]) -> OnnxModule:
    """A network without weights: every initializer that is left is a constant."""
    return OnnxModule(
        TrainingGraph(source=model, model=model, weights=(), states=(), ties={}, frozen={}, notes=()), outputs
    )


def _call(net: OnnxModule, outputs: tuple[str, ...], inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    results = net(**inputs)
    return dict(zip(outputs, results if isinstance(results, tuple) else (results,), strict=True))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
