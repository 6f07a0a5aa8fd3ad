"""What onward knows of an optimizer without torch: its names, its attributes with their defaults, its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """An optimizer.

    Attributes:
        name: the value of `optimizer.training_optimizer_name`.
        defaults: attributes that a rule of `optimizer_attributes` can set -> their defaults; `learning_rate_factor`
            belongs to all optimizers and is not listed.
        other_names: by which it is known, too; in lower case, any case is accepted.
        is_elementwise: whether the update of an element depends on no other element, so that a rank can update its
            shard of a weight by itself.
        needs_full_weights: why a rank must hold full weights; empty: it need not.
        replicated_slots: those that every rank holds of the full weight, even where it holds a shard of the weight.
        averages_weights: whether its result is an average of the weights, rather than the weights that are trained.
        why_no_graph: why its update is not written as an ONNX graph; empty: it is.
    """

    name: str
    defaults: Mapping[str, Any]
    other_names: tuple[str, ...] = ()
    is_elementwise: bool = True
    needs_full_weights: str = ""
    replicated_slots: tuple[str, ...] = ()
    averages_weights: bool = False
    why_no_graph: str = ""
