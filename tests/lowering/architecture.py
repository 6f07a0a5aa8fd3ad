"""One architecture to be exported and compared: how it is built, what it takes, how it is exported."""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """A tiny random instance of an architecture.

    Attributes:
        name: what a test calls it.
        make: builds the module.
        inputs: its inputs, batch first.
        opset: the version it is exported to.
        axes: axes of every input whose size stays open in the export; empty: all sizes are fixed.
        slow: left to the long run.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    opset: int = 18
    axes: tuple[int, ...] = ()
    slow: bool = False

    def __str__(self) -> str:
        return self.name


def export_program(module: nn.Module, architecture: Architecture) -> Any:
    """The exporter's own program, before its optimizer; parameters keep their names."""
    shapes: Any = None
    if architecture.axes:
        shapes = tuple(
            {axis: torch.export.Dim.DYNAMIC for axis in architecture.axes if axis < x.dim()}
            for x in architecture.inputs
        )
        if len(list(_variadic(module))) == 1:
            shapes = (shapes,)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return torch.onnx.export(
            module,
            architecture.inputs,
            dynamo=True,
            opset_version=architecture.opset,
            optimize=False,
            dynamic_shapes=shapes,
            verbose=False,
        )


def _variadic(module: nn.Module) -> list[str]:
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
