"""A round that is given in epochs, converted to steps: what everything after it, schedules and displays, counts in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from onward.parameters import Parameters, Training, check


def is_in_epochs(parameters: Parameters) -> bool:
    """Whether a field of the round is given in epochs."""
    training = parameters.training
    return training.known_steps is None or training.evaluation_period_epochs is not None


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
    steps, period = training.known_steps, training.evaluation_period
    notes = []
    if training.num_epochs is not None:
        steps = _steps(training.num_epochs, samples, parameters)
        how = _how(training.num_epochs, samples, parameters)
        notes.append(f"training.num_epochs: {how} take {steps:,} {_plural(steps, 'step')}")
    if training.evaluation_period_epochs is not None:
        period = _steps(training.evaluation_period_epochs, samples, parameters)
        every = f"every {_epochs(training.evaluation_period_epochs)} is every {period:,} {_plural(period, 'step')}"
        notes.append(f"evaluation {every}")
    if parameters.data.last_batch == "wrap" and training.batch_size > min(samples):
        notes.append(
            f"training.batch_size is {training.batch_size:,}, above the {min(samples):,} samples of "
            f"{'an epoch' if len(samples) == 1 else 'a replica'}, so that a batch holds each of them several times"
        )
    assert steps is not None
    converted = replace(training, evaluation_period=period, evaluation_period_epochs=None)
    return _with_steps(parameters, converted, steps), "; ".join(notes) + "."


def updates_in_steps(parameters: Parameters, done: tuple[int, int] = (0, 0)) -> Parameters:
    """The same round in steps, if it is given in weight updates.

    Args:
        parameters: of a round.
        done: steps and updates of it that were made before, maybe with another accumulation.

    Raises:
        ParametersError: fields contradict each other then.
    """
    training, (steps, updates) = parameters.training, done
    if training.num_updates is None:
        return parameters
    # Where the micro-batch is found or halved, an update keeps its samples, and steps are converted by that.
    is_converted = training.find_batch_size or training.halve_batch_on_out_of_memory or parameters.distributed.elastic
    if not updates or is_converted or steps % training.gradient_accumulation_steps:
        return _with_steps(parameters, training, training.steps)
    left = max(0, training.num_updates - updates)
    return _with_steps(parameters, training, steps + left * training.gradient_accumulation_steps)


def _with_steps(parameters: Parameters, training: Training, steps: int) -> Parameters:
    converted = replace(training, num_train_steps=steps, num_updates=None, num_epochs=None)
    return check(replace(parameters, training=converted))


def _steps(epochs: float, samples: Sequence[int], parameters: Parameters) -> int:
    """Steps in which every replica reads its samples so often; they end with a weight update."""
    training, last = parameters.training, parameters.data.last_batch
    asked = Fraction(epochs).limit_denominator(1_000_000)
    batches = max(Fraction(count, training.batch_size) for count in samples)
    if parameters.distributed.elastic:  # as many updates with any number of replicas
        batches = Fraction(sum(samples), len(samples) * training.batch_size)
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
    return f"{epochs:g} {_plural(epochs, 'epoch')}"


def _plural(count: float, word: str) -> str:
    return word if count == 1 else f"{word}s"
