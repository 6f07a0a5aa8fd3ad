"""What a device bundle consists of, as values: the tensors of its state, its graphs, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import onnx_ir as ir

from onward.engine.inputs.index_ranges import FeatureRange

Kind = Literal["weight", "average", "moment", "statistic", "counter", "seed", "accumulator"]

SEED = "seed"
SKIPPED = "skipped_updates"
LOSS_SCALE = "loss_scale"
FINITE_UPDATES = "finite_updates"
ACCUMULATED = "accumulated_passes"
COUNTED = "accumulated_count"
LOSS_SUM = "accumulated_loss"


def accumulator_name(weight: str, part: int = 0) -> str:
    """The name of the tensor that gradients of a weight are added to, of a part of the loss."""
    return f"{weight}_grad_sum" + (f"_{part}" if part else "")


def count_name(part: int = 0) -> str:
    """The name of what accumulated passes count, of a part of the loss."""
    return COUNTED + (f"_{part}" if part else "")


def average_name(weight: str) -> str:
    """The name of the average of a weight that evaluation and inference take, where an optimizer averages."""
    return f"{weight}_average"


def kept_name(statistic: str) -> str:
    """The name of a running statistic as it was after the last update, for an update that is skipped."""
    return f"{statistic}_kept"


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """A tensor that a device keeps from one call to the next.

    Attributes:
        name: of the input that takes it; the graph that changes it has an output `<name>_new`.
        dtype, shape: of the tensor.
        kind: what it is.
        start: its first values; None: zeros.
    """

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    kind: Kind
    start: ir.TensorProtocol | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceMetric:
    """A metric of an evaluation: the sum of one output of `eval.onnx` over all batches, divided by that of another.

    Attributes:
        name: of the metric.
        sum, count: the two outputs; empty where it is a total.
        total_of: metrics that it is the sum of.
    """

    name: str
    sum: str = ""
    count: str = ""
    total_of: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DeviceGraphs:
    """The graphs of a bundle before they are written.

    Attributes:
        models: name ("step", or "train" and "update"; "eval", "infer") -> model.
        state: what is kept between calls.
        metrics: of `eval`.
        labels: inputs that are labels.
        feature_ranges: inputs that are class labels or pick rows of tables -> which numbers they may hold.
        notes: for the user, a sentence each.
        about: further entries of the manifest.
    """

    models: Mapping[str, ir.Model]
    state: tuple[StateTensor, ...]
    metrics: tuple[DeviceMetric, ...] = ()
    labels: tuple[str, ...] = ()
    feature_ranges: Mapping[str, FeatureRange] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
