"""Memory that ran out while training: one message with what to do, and the same run with smaller micro-batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onward.engine.loop import StepDone
from onward.engine.state import TrainState
from onward.errors import OutOfMemoryError
from onward.parallel.launch.restarting import LARGEST_BATCH
from onward.parallel.watch.cause import out_of_memory
from onward.parameters import Parameters
from onward.plan.batch_size import micro_batch_sizes, with_micro_batches


def explaining_out_of_memory(
    steps: Iterator[StepDone], parameters: Parameters, state: TrainState
) -> Iterator[StepDone]:
    """The same steps; where memory runs out, the message says with which micro-batch and what to do.

    Raises:
        OutOfMemoryError: memory ran out.
    """
    try:
        yield from steps
    except Exception as error:
        cause = out_of_memory(error)
        if cause is None:
            raise
        training, step = parameters.training, state.counters.step + 1
        # Checkpoints are saved after this, with the memory that the failed step had taken.
        raise OutOfMemoryError(
            f"memory ran out in step {step}, with micro-batches of {training.batch_size} samples: "
            f"{str(cause).partition(chr(10))[0]}\nSet training.batch_size to a smaller value and raise "
            "gradient_accumulation_steps, let training.find_batch_size or training.halve_batch_on_out_of_memory do so, "
            "or save memory by recompute, speed.update_in_backward or distributed.zero_stage.",
            training.batch_size,
        ) from error


def largest_batch(record: Mapping[str, Any]) -> int | None:
    """The largest micro-batch that is known to fit, from a checkpoint's record and the launcher of this process."""
    given = os.environ.get(LARGEST_BATCH)
    known = [size for size in (record.get("largest_batch"), int(given) if given else None) if size is not None]
    return min(known, default=None)


def with_smaller_batch(parameters: Parameters, largest: int | None) -> Parameters:
    """The same round with micro-batches of at most `largest` samples, where the run asks for that."""
    training = parameters.training
    if largest is None or not training.halve_batch_on_out_of_memory or training.batch_size <= largest:
        return parameters
    sizes = [size for size in micro_batch_sizes(parameters) if size <= largest]
    return with_micro_batches(parameters, sizes[-1] if sizes else micro_batch_sizes(parameters)[0])


def smaller_batches(parameters: Parameters, tried: int | None) -> Sequence[int]:
    """The micro-batches of at most half of what was tried, the smallest first."""
    most = (parameters.training.batch_size if tried is None else tried) // 2
    return [size for size in micro_batch_sizes(parameters) if size <= most]
