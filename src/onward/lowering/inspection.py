"""`onward inspect`: what a model holds, what of it trains, and which of its operators have no lowering."""

from __future__ import annotations

from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render
from onward.graph.reading.model_file import ModelSource
from onward.graph.training_graph import TrainingGraph
from onward.lowering.ledger import fate_of, why_refused
from onward.parameters.limits import DEFAULT_LIMITS, Limits


def describe(
    model: ModelSource,
    *,
    weight_rows: int = 20,
    limits: Limits = DEFAULT_LIMITS,
    training: TrainingGraph | None = None,
) -> str:
    """The text of `onward inspect`; `weight_rows` is how many weights are listed at most, `training` what was read.

    Raises:
        ModelError: the model cannot be read.
    """
    return render(inspect(model, why_not_lowered, limits, training), largest_weights=weight_rows)


def why_not_lowered(domain: str, op_type: str, version: int) -> str | None:
    """Why an operator cannot be lowered at an opset version of its domain, or None if it can."""
    if fate_of(domain, op_type, version) in ("lowered", "expanded"):
        return None
    return why_refused(domain, op_type) or f"no lowering of it at version {version} of its domain is known"
