"""The loss scale of fp16 training: an immutable value and its next value. Gradients of a loss multiplied by it do not
underflow in fp16; they are divided by it before they are used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """A factor for the loss, static or dynamic.

    The dynamic one doubles after `window_updates` weight updates in a row with finite gradients and halves at each one
    without, within its bounds (Micikevicius et al. 2018, "Mixed Precision Training", arXiv 1710.03740, section 3.2; the
    constants are those of ONNX Runtime's training runner).

    Attributes:
        scale: the factor now.
        dynamic: whether `after` changes it.
        finite_updates: weight updates with finite gradients since the scale last changed.
        initial_scale: what `reset` goes back to.
        window_updates, minimum, maximum: of the dynamic scale.
    """

    scale: float = 65536.0
    dynamic: bool = True
    finite_updates: int = 0
    initial_scale: float = 65536.0
    window_updates: int = 2000
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"the loss scale is {self.scale}; expected a positive, finite number")

    @staticmethod
    def of_parameter(loss_scale: float) -> LossScale:
        """What `mixed_precision.loss_scale` means: 0 is dynamic from 65536, anything else is static."""
        if loss_scale == 0:
            return LossScale()
        return LossScale(scale=float(loss_scale), dynamic=False, initial_scale=float(loss_scale))

    def after(self, finite: bool) -> LossScale:
        """The loss scale after a weight update whose gradients were all finite, or were not and which was skipped."""
        if not self.dynamic:
            return self
        if not finite:
            return replace(self, scale=max(self.minimum, self.scale / 2), finite_updates=0)
        if self.finite_updates + 1 >= self.window_updates:
            return replace(self, scale=min(self.maximum, self.scale * 2), finite_updates=0)
        return replace(self, finite_updates=self.finite_updates + 1)

    def reset(self) -> LossScale:
        """The initial scale with nothing counted, for another round on other data."""
        return replace(self, scale=self.initial_scale, finite_updates=0)

    def to_json(self) -> dict[str, Any]:
        """All attributes as plain JSON values; `from_json` gives back an equal value."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LossScale:
        """The value that `to_json` wrote.

        Raises:
            TypeError: a field is missing or unknown, with its name.
        """
        expected = set(LossScale.__dataclass_fields__)
        if set(value) != expected:
            raise TypeError(f"a loss scale has the fields {sorted(expected)}, found {sorted(value)}")
        return LossScale(**value)
