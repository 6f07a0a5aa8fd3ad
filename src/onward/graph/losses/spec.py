"""What a loss is asked to be, and the names of what it added to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onward.parameters import Loss
from onward.parameters.limits import DEFAULT_LIMITS, Limits


@dataclass(frozen=True, kw_only=True)
class LossSpec(Loss):
    """What to minimize: the section `loss` of RUN.yaml, and `limits` for what a loss model may ask of the machine."""

    limits: Limits = DEFAULT_LIMITS


@dataclass(frozen=True, kw_only=True)
class LossNames:
    """Where the loss is in the graph.

    Attributes:
        loss: the value to minimize, an output of the graph; float32 of rank 0.
        parts: further outputs of the graph that the loss is made of (bert: mlm_loss, nsp_loss).
        addends: two outputs whose sum is the loss, where the second is a mean over samples, whatever the first is.
        labels: inputs of the graph that are labels, those it had already included.
        constants: initializers that belong to the loss and never train.
        correct: how many labels (ctc: label sequences) the prediction hits, if asked for: an int64 output of rank 0.
        counted: of how many; of a binary cross entropy, labels that are 0 or 1.
        classes: labels that are classes, each with how many there are, where the model fixes that.
        notes: what the loss is computed from instead of the prediction, for the user.
        holds_probabilities: whether the prediction, as the model computes it, holds probabilities and not logits.
        outputs: of the model, from which a function outside of the graph computes the loss; `loss` is empty then.
        projections: initializers of the loss that are trained and not exported.
    """

    loss: str
    parts: tuple[str, ...] = ()
    addends: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    correct: str | None = None
    counted: str | None = None
    classes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    holds_probabilities: bool = False
    outputs: tuple[str, ...] = ()
    projections: tuple[str, ...] = ()

    @property
    def computed(self) -> tuple[str, ...]:
        """The values that a training pass computes: the loss, or what it is computed from."""
        return self.outputs or (self.loss,)
