"""Rounds given in epochs, converted to steps by the samples of the data; all ranks get the same number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from onward.data.batches import BatchSource
from onward.data.sample_counts import samples_of_replicas
from onward.errors import ParametersError
from onward.parallel.agreement import gather_numbers
from onward.parallel.launch.process import Mesh
from onward.parameters import Parameters
from onward.plan.epochs import in_steps, is_in_epochs, updates_in_steps


def count_in_steps(
    parameters: Parameters, replicas: int, notify: Callable[[str], None], record: Mapping[str, Any] | None = None
) -> Parameters:
    """The run with all its rounds in steps, where `paths.train_data_dir` holds their data; `notify` gets a note.

    Args:
        parameters: of the run.
        replicas: that read data.
        notify: gets a note on each round that was given in epochs.
        record: of the checkpoint that the run resumes from.

    Raises:
        DataError: the data cannot be read.
        ParametersError: fields contradict each other in steps.
    """
    later = tuple(count_in_steps(one, replicas, _in_later_round(notify)) for one in parameters.next_rounds)
    counters = {} if record is None else record["counters"]
    done = (counters["step"], counters["update"]) if counters and not counters["round"] else (0, 0)
    parameters = updates_in_steps(replace(parameters, next_rounds=later), done)
    folder = parameters.paths.train_data_dir
    if folder is None or not is_in_epochs(parameters):
        return parameters
    samples = samples_of_replicas(folder, replicas, parameters.data.skip_corrupt_files)
    parameters, note = in_steps(parameters, samples)
    notify(note)
    return parameters


def count_in_steps_of(
    parameters: Parameters, source: BatchSource, mesh: Mesh, notify: Callable[[str], None]
) -> Parameters:
    """A round in steps, by the data that it is about to be trained with; every rank calls this.

    Raises:
        ParametersError: the source does not know how many samples it has, or fields contradict each other in steps.
    """
    if not is_in_epochs(parameters):
        return parameters
    samples = getattr(source, "sample_count", None)
    if samples is None:
        raise ParametersError(
            f"training.num_epochs is {parameters.training.num_epochs}, but the training data ({type(source).__name__}) "
            "have no sample_count, so the length of an epoch is unknown. Set training.num_train_steps instead."
        )
    counts, topology = gather_numbers(mesh, float(samples)), mesh.topology
    of_replicas = {topology.reader(topology.place(rank)): int(count) for rank, count in enumerate(counts)}
    assert of_replicas[mesh.reader] == samples
    parameters, note = in_steps(parameters, [of_replicas[replica] for replica in sorted(of_replicas)])
    notify(note)
    return parameters


def _in_later_round(notify: Callable[[str], None]) -> Callable[[str], None]:
    return lambda note: notify(f"a later round: {note}")
