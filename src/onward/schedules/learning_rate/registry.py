"""The decays that `learning_rate.warmup_mode` can name, in the order in which messages list them: a new one is a line
here."""

from __future__ import annotations

from onward.schedules.learning_rate.constant import CONSTANT
from onward.schedules.learning_rate.cosine import COSINE
from onward.schedules.learning_rate.cosine_restarts import COSINE_RESTARTS
from onward.schedules.learning_rate.decay import Decay
from onward.schedules.learning_rate.linear import LINEAR
from onward.schedules.learning_rate.no_decay import NONE
from onward.schedules.learning_rate.piecewise import PIECEWISE
from onward.schedules.learning_rate.polynomial import POLYNOMIAL
from onward.schedules.learning_rate.warmup_stable_decay import WARMUP_STABLE_DECAY
from onward.spelling import listed

DECAYS: tuple[Decay, ...] = (
    NONE,
    CONSTANT,
    LINEAR,
    POLYNOMIAL,
    COSINE,
    COSINE_RESTARTS,
    WARMUP_STABLE_DECAY,
    PIECEWISE,
)


def decay_named(name: str) -> Decay:
    """The decay of a name in any case; ONNX Runtime's "Poly" too.

    Raises:
        ValueError: there is none.
    """
    found = next((decay for decay in DECAYS if name.lower() in (decay.name, decay.other_name)), None)
    if found is None:
        raise ValueError(f"expected {listed([decay.name for decay in DECAYS])}")
    return found
