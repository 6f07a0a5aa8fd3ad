"""The user's own loss and metrics: torch functions of (outputs, batch), called outside of the graph.

Outputs are those of the model by name, those in 16 bits as float32; the batch holds every feature of the data by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from onward.engine.gradient_reduction import GradientReduction
from onward.errors import ParametersError
from onward.lowering.kernels.dtypes import tensor_from_array

Tensors = Mapping[str, torch.Tensor]
LossFunction = Callable[[Tensors, Tensors], torch.Tensor]
"""Gives the loss of a batch, a torch scalar with a gradient."""

MetricFunction = Callable[[Tensors, Tensors], Any]
"""Gives the mean over the samples of a batch, or a pair: a sum over the batch, and how many it counts."""

_LOW = (torch.float16, torch.bfloat16)


def call_loss(function: LossFunction, outputs: Mapping[str, Any], batch: Tensors) -> torch.Tensor:
    """The loss of a batch in float32 or float64.

    Raises:
        ParametersError: the function returned anything but one number that depends on the outputs.
    """
    loss = _call("loss", function, outputs, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise ParametersError(
            f"the loss function {name_of(function)} returned {_describe(loss)}; expected one float number as a torch "
            "tensor. Reduce it, with .mean() or .sum()."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ParametersError(
            f"the loss function {name_of(function)} returned a number without a gradient; compute it from the outputs "
            f"({', '.join(map(repr, outputs))}) with torch, without .item(), .detach() or numpy."
        )
    return loss.reshape(())


def features_on(device: torch.device, features: Mapping[str, Any], known: Tensors) -> dict[str, torch.Tensor]:
    """All features of a batch as tensors on the device, those that were read already as they are."""
    further = {name: value for name, value in features.items() if name not in known}
    tensors = {
        name: (value if isinstance(value, torch.Tensor) else tensor_from_array(value)).to(device)
        for name, value in further.items()
    }
    return {**known, **tensors}


class FunctionMetrics:
    """Adds up own metrics over a test set, each seen once.

    Args:
        functions: metric -> function.
        outputs: values that the functions get.
        device: where they are computed.
    """

    def __init__(self, functions: Mapping[str, MetricFunction], outputs: tuple[str, ...], device: torch.device) -> None:
        self._functions = functions
        self._outputs = outputs
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self._sums = dict.fromkeys(functions, (zero, zero))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the metrics."""
        return tuple(self._functions)

    def add(self, features: Tensors, values: Mapping[str, Any], samples: int) -> None:
        """Counts one batch.

        Raises:
            ParametersError: a function returned neither a number nor a pair of them.
        """
        outputs = {name: values[name] for name in self._outputs}
        for name, function in self._functions.items():
            total, count = _as_pair(name, function, _call(f"metric {name!r}", function, outputs, features), samples)
            before, counted = self._sums[name]
            self._sums[name] = (before + total.to(before.device), counted + count.to(before.device))

    def compute(self, reduction: GradientReduction | None) -> dict[str, float]:
        """The metrics of all batches, of all ranks that share the test set."""
        if not self._sums:
            return {}
        numbers = torch.stack([part for pair in self._sums.values() for part in pair])
        if reduction is not None:
            numbers = reduction.sum_over_replicas(numbers)
        values = numbers.tolist()
        pairs = zip(self._sums, values[::2], values[1::2], strict=True)
        return {name: total / count if count else float("nan") for name, total, count in pairs}


def name_of(function: Callable[..., Any]) -> str:
    """A function as messages name it."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def _call(what: str, function: Callable[..., Any], outputs: Mapping[str, Any], batch: Tensors) -> Any:
    given = {
        name: value.float() if isinstance(value, torch.Tensor) and value.dtype in _LOW else value
        for name, value in outputs.items()
    }
    try:
        return function(given, batch)
    except Exception as error:
        held = ", ".join(f"{name!r} {_describe(value)}" for name, value in given.items())
        features = ", ".join(f"{name!r} {_describe(value)}" for name, value in batch.items())
        error.add_note(f"Raised in the {what} function {name_of(function)}; outputs: {held}; batch: {features}.")
        raise


def _as_pair(name: str, function: MetricFunction, value: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    pair = value if isinstance(value, tuple) else (value, None)
    if len(pair) != 2 or pair[0] is None or not all(_is_number(one) for one in pair):
        raise ParametersError(
            f"the metric function {name_of(function)} of {name!r} returned {_describe(value)}; expected a number, the "
            "mean over the batch, or a pair (sum, count)."
        )
    total = torch.as_tensor(pair[0]).detach().double().reshape(())
    if pair[1] is None:
        return total * samples, torch.tensor(float(samples), dtype=torch.float64)
    return total, torch.as_tensor(pair[1]).detach().double().reshape(())


def _is_number(value: Any) -> bool:
    if value is None or isinstance(value, int | float):
        return True
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}"
