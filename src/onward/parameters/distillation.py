"""The section `distillation` of RUN.yaml: a teacher, and what the trained model learns from it besides its labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onward.parameters.field_types import STRICT, NonNegative, Positive, Share


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """A teacher from which the trained model, the student, learns; the exported model is the student alone.

    The loss is `(1 - alpha) * label loss + alpha * temperature^2 * KL + pairs_weight * sum of the pairs' losses`.

    Attributes:
        teacher_path: any ONNX model; it reads the student's inputs, or features, of the same names, is computed without
            gradient in every step, and does not change; absent: no distillation.
        teacher_logits: the teacher's output that corresponds to `loss.prediction`; absent: its output of that name, or
            its only one.
        temperature: divides the logits of both before the softmax (Hinton et al., arXiv:1503.02531).
        alpha: weight of the Kullback-Leibler divergence from the teacher's to the student's class probabilities.
        pairs: value of the student -> value of the teacher, compared by their mean squared error. If their shapes
            differ in one axis, a linear projection of the student's value is trained for it, which is not exported.
        pairs_weight: weight of the sum of these errors.
    """

    __pydantic_config__ = STRICT
    teacher_path: Path | None = None
    teacher_logits: str | None = None
    temperature: Positive = 2.0
    alpha: Share = 0.5
    pairs: Mapping[str, str] = field(default_factory=dict)
    pairs_weight: NonNegative = 1.0
