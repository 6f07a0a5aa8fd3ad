"""The section `limits` of RUN.yaml: how much a model may ask of the machine before it is refused."""

from __future__ import annotations

from dataclasses import dataclass

from onward.parameters.field_types import STRICT, Count, Positive


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What reading and preparing a model may take: a small file can stand for a graph that no machine holds.

    Every model of today is far below the defaults. In Python pass `onward.parameters.Limits(nodes=...)` as `limits`
    of `onward.to_torch`.

    Attributes:
        model_gb: stored tensors of a model together, in GB (10^9 bytes), those in files beside it included.
        nodes: nodes of a model, those of nested graphs included, functions expanded at every call.
        nesting: graphs inside of each other, and functions that call each other.
        tensor_axes: axes of an input, an output or a stored tensor.
        shape_numbers: numbers that follow from constants before a model runs, as shape arithmetic computes them, for
            one value.
        constant_gb: a tensor whose sizes stored numbers give, as a range or a fill, in GB (10^9 bytes).
        preparation_seconds: from reading a model to the graph that trains, before any step.
    """

    __pydantic_config__ = STRICT
    model_gb: Positive = 2000.0
    nodes: Count = 500_000
    nesting: Count = 30
    tensor_axes: Count = 64
    shape_numbers: Count = 1_000_000
    constant_gb: Positive = 16.0
    preparation_seconds: Positive = 3600.0


DEFAULT_LIMITS = Limits()
"""Of calls in Python that pass none."""
