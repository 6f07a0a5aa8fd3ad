"""A round that is given in epochs, converted to steps: what everything after it, schedules and displays, counts in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from onward.parameters import Parameters, check


def is_in_epochs(parameters: Parameters) -> bool:
    """Whether a field of the round is given in epochs."""
    training = parameters.training
    return training.num_train_steps is None or training.evaluation_period_epochs is not None


def in_steps(parameters: Parameters, samples: Sequence[int]) -> tuple[Parameters, str]:
    """The same round in steps, and a note.

    Every replica reads all its samples as often as asked; those with fewer samples than others begin another epoch.

    Args:
        parameters: of a round, given in epochs.
        samples: of an epoch, of every replica.

    Raises:
        ParametersError: fields contradict each other then, such as a warm-up longer than the round.
    """
    training = parameters.training
    steps, period = training.num_train_steps, training.evaluation_period
    notes = []
    if training.num_epochs is not None:
        steps = _steps(training.num_epochs, samples, parameters)
        notes.append(f"training.num_epochs: {_how(training.num_epochs, samples, parameters)} take {steps:,} steps")
    if training.evaluation_period_epochs is not None:
        period = _steps(training.evaluation_period_epochs, samples, parameters)
        notes.append(f"evaluation every {_epochs(training.evaluation_period_epochs)} is every {period:,} steps")
    assert steps is not None
    converted = replace(
        training, num_train_steps=steps, num_epochs=None, evaluation_period=period, evaluation_period_epochs=None
    )
    return check(replace(parameters, training=converted)), "; ".join(notes) + "."


def _steps(epochs: float, samples: Sequence[int], parameters: Parameters) -> int:
    """Steps in which every replica reads its samples so often; they end with a weight update."""
    training, last = parameters.training, parameters.data.last_batch
    asked = Fraction(epochs).limit_denominator(1_000_000)
    batches = max(Fraction(count, training.batch_size) for count in samples)
    if last != "wrap":
        batches = Fraction(math.floor(batches) if last == "drop" else math.ceil(batches))
    updates = asked * batches / training.gradient_accumulation_steps
    return max(1, math.ceil(updates)) * training.gradient_accumulation_steps


def _how(epochs: float, samples: Sequence[int], parameters: Parameters) -> str:
    training = parameters.training
    text = f"{_epochs(epochs)} of {sum(samples):,} samples in batches of {training.batch_size}"
    if len(samples) > 1:
        text += f" on each of {len(samples)} replicas"
    if training.gradient_accumulation_steps > 1:
        text += f", {training.gradient_accumulation_steps} batches an update,"
    return text


def _epochs(epochs: float) -> str:
    return "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
