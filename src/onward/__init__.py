"""onward: train any ONNX model across processes, GPUs and nodes. ONNX in, ONNX out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onward.graph.reading.garbage_collection import importing

if TYPE_CHECKING:
    from onward.artifacts.inference_model import export as export
    from onward.data.loader import DataLoader as DataLoader
    from onward.engine.callbacks import Callback as Callback
    from onward.environment import Environment as Environment
    from onward.fitting.fit import fit as fit
    from onward.lowering.adapting import add_adapter as add_adapter
    from onward.lowering.conversion import to_torch as to_torch
    from onward.parameters import Parameters as Parameters
    from onward.runner import TrainingRunner as TrainingRunner

__version__ = "0.1.0"

_HOMES = {
    "Callback": "onward.engine.callbacks",
    "DataLoader": "onward.data.loader",
    "Environment": "onward.environment",
    "Parameters": "onward.parameters",
    "TrainingRunner": "onward.runner",
    "add_adapter": "onward.lowering.adapting",
    "fit": "onward.fitting.fit",
    "export": "onward.artifacts.inference_model",
    "to_torch": "onward.lowering.conversion",
}
"""Public name -> the module it lives in; imported at first use, so that `onward --help` does not load torch."""

__all__ = [
    "Callback",
    "DataLoader",
    "Environment",
    "Parameters",
    "TrainingRunner",
    "__version__",
    "add_adapter",
    "export",
    "fit",
    "to_torch",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        with importing():
            found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return found
    raise AttributeError(f"module 'onward' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
