"""The same run with another number of replicas: an update keeps its samples, whatever its micro-batches."""

from __future__ import annotations

import dataclasses

from onward.errors import ParametersError
from onward.parameters import Parameters, check
from onward.plan.batch_size import samples_of_update, with_micro_batches
from onward.spelling import shortened


def fit_to_ranks(parameters: Parameters, ranks: int) -> tuple[Parameters, list[str]]:
    """An elastic run as `ranks` processes train it, all rounds of it, and notes; any other run as it is.

    Args:
        parameters: as asked for.
        ranks: processes that were started.

    Raises:
        ParametersError: the processes make no number of replicas among which the samples of an update can be divided.
    """
    asked = parameters.distributed
    if not asked.elastic:
        return parameters, []
    of_one = dataclasses.replace(asked, data_parallel_size=1)
    replicas, rest = divmod(ranks, of_one.world_size)
    if rest or not replicas:
        raise ParametersError(
            f"distributed.elastic: {ranks} processes were started, but a replica is {of_one.world_size} processes "
            f"({of_one.product}). Start a multiple of {of_one.world_size}."
        )
    rounds = [_with_replicas(one, replicas) for one in (parameters, *parameters.next_rounds)]
    first, *later = [fitted for fitted, _ in rounds]
    return check(dataclasses.replace(first, next_rounds=tuple(later))), list(dict.fromkeys(note for _, note in rounds))


def _with_replicas(parameters: Parameters, replicas: int) -> tuple[Parameters, str]:
    """A round with so many replicas, and a note."""
    samples = parameters.distributed.data_parallel_size * samples_of_update(parameters)
    possible = shortened([str(count) for count in range(1, samples + 1) if samples % count == 0], 12)
    if samples % replicas:
        raise ParametersError(
            f"distributed.elastic: an update has {samples} samples (data_parallel_size "
            f"{parameters.distributed.data_parallel_size} * batch_size {parameters.training.batch_size} * "
            f"gradient_accumulation_steps {parameters.training.gradient_accumulation_steps}), which {replicas} "
            f"replicas cannot share equally. Start {possible} replicas, or choose a number of samples that all "
            "numbers of replicas divide that can occur."
        )
    own = samples // replicas
    resized = dataclasses.replace(
        parameters,
        distributed=dataclasses.replace(parameters.distributed, data_parallel_size=replicas),
        next_rounds=(),
    )
    problem = None
    for size in (size for size in range(min(own, parameters.training.batch_size), 0, -1) if own % size == 0):
        try:
            fitted = with_micro_batches(resized, size, own // size)
        except ParametersError as error:  # a pipeline needs a number of micro-batches
            problem = problem or error
            continue
        training = fitted.training
        return fitted, (
            f"distributed.elastic: {replicas} replica{'s' if replicas > 1 else ''} with micro-batches of "
            f"{training.batch_size} samples, {training.gradient_accumulation_steps} an update, which has {samples} "
            f"samples as with any number of replicas. Possible numbers: {possible}."
        )
    assert problem is not None
    raise problem
