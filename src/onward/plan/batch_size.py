"""The same run in larger or smaller micro-batches: how many samples make an update stays as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

from onward.errors import ParametersError
from onward.parameters import Parameters, check


def samples_of_update(parameters: Parameters) -> int:
    """Samples of one replica that make a weight update."""
    return parameters.training.batch_size * parameters.training.gradient_accumulation_steps


def with_micro_batches(parameters: Parameters, size: int, count: int | None = None) -> Parameters:
    """The same run with micro-batches of `size` samples, a divisor of those of an update.

    Everything that is counted in steps is counted in the new ones: the steps of the round, of the warm-up, between
    two evaluations and under the profiler; those that come out between two steps are rounded.

    Args:
        parameters: of a round.
        size: samples of a micro-batch.
        count: micro-batches of an update, where replicas divide its samples again; None: as many as before need.

    Raises:
        ParametersError: fields contradict each other then (a pipeline needs a number of micro-batches).
    """
    training, rate, profiler = parameters.training, parameters.learning_rate, parameters.profiler
    if count is None:
        ratio, count = Fraction(training.batch_size, size), samples_of_update(parameters) // size
    else:
        ratio = Fraction(count, training.gradient_accumulation_steps)
    if (size, count) == (training.batch_size, training.gradient_accumulation_steps):
        return parameters
    steps = None if training.num_train_steps is None else int(training.num_train_steps * ratio)

    def converted(count: int | None) -> int | None:
        if not count:
            return count
        return max(1, round(count * ratio)) if steps is None else min(max(1, round(count * ratio)), steps)

    return check(
        dataclasses.replace(
            parameters,
            training=dataclasses.replace(
                training,
                batch_size=size,
                gradient_accumulation_steps=count,
                num_train_steps=steps,
                evaluation_period=converted(training.evaluation_period) or 0,
            ),
            learning_rate=dataclasses.replace(rate, warmup_steps=converted(rate.warmup_steps)),
            profiler=dataclasses.replace(
                profiler, first_step=converted(profiler.first_step), last_step=converted(profiler.last_step)
            ),
        )
    )


def micro_batch_sizes(parameters: Parameters) -> tuple[int, ...]:
    """The sizes that divide an update's samples and that the run can have, the smallest first."""
    samples = samples_of_update(parameters)
    return tuple(size for size in range(1, samples + 1) if samples % size == 0 and _is_possible(parameters, size))


def _is_possible(parameters: Parameters, size: int) -> bool:
    try:
        with_micro_batches(parameters, size)
    except ParametersError:
        return False
    return True


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The last of ascending sizes of which `fits` is true, if it is true of all before it; None: of none."""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else None
