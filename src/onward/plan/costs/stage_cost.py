"""What one pipeline stage costs for one micro-batch, by the kind of work that a schedule orders."""

from __future__ import annotations

from dataclasses import dataclass

from onward.schedules.pipeline.actions import ActionKind


@dataclass(frozen=True)
class StageCost:
    """Seconds (or any unit) that a micro-batch takes on a stage.

    Attributes:
        forward: the forward pass.
        backward_input: gradients of the activations.
        backward_weight: gradients of the weights; a schedule that does not split takes the sum of both.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    def of(self, kind: ActionKind) -> float:
        """What one action costs."""
        if kind == "backward":
            return self.backward_input + self.backward_weight
        return {
            "forward": self.forward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }[kind]
