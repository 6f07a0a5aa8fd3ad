"""Finding the largest micro-batch that fits a rank's memory: by the forecast first, then by trial steps.

All ranks of a run come to the same answer, and a run that is resumed keeps the one it was begun with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onward.data.shard import FeatureSpec
from onward.engine.building.preparation import plan_run
from onward.engine.faults.out_of_memory import largest_batch, with_smaller_batch
from onward.engine.forecast.plan_forecast import forecast
from onward.engine.forecast.trial import trial_bytes
from onward.engine.state import Counters
from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import input_types
from onward.parallel.agreement import agree_on_least
from onward.parallel.launch.process import Mesh
from onward.parallel.memory import memory_of_rank
from onward.parameters import Parameters
from onward.plan.batch_size import largest_that_fits, micro_batch_sizes, samples_of_update, with_micro_batches
from onward.plan.topology import Topology

TRIED_SHARE = 1.15
"""What the forecast puts up to so far above the limit is tried, where it can be: forecasts are right within a tenth."""

UNTRIED_SHARE = 0.9
"""Where nothing can be tried, the forecast has to stay below this share of the limit."""


@dataclass(kw_only=True)
class BatchSizes:
    """The micro-batches of a run's rounds, for runs that ask to have them found.

    Attributes:
        found: number of the round -> [samples of an update, micro-batch], as it goes into checkpoints.
        largest: the most samples of a micro-batch that memory suffices for, as far as it is known.
        begun_round: in the middle of which the checkpoint stands that the run resumes from; None: of none.
    """

    found: dict[str, list[int]] = field(default_factory=dict)
    begun_round: int | None = None
    largest: int | None = None
    _reported: set[int] = field(default_factory=set)
    _told_smaller: set[int] = field(default_factory=set)

    def settle(
        self,
        parameters: Parameters,
        number: int,
        mesh: Mesh,
        graph: TrainingGraph,
        specs: Mapping[str, FeatureSpec],
        notify: Callable[[str], None],
    ) -> Parameters:
        """Parameters of a round with the micro-batch that it is to have; as they are where none is to be found.

        Raises:
            ParametersError: not even the smallest micro-batch fits, or the model fixes its batch.
        """
        if not parameters.training.find_batch_size:
            return self._with_smaller_batch_size(parameters, number, notify)
        samples = samples_of_update(parameters)
        if self.found.get(str(number), [0])[0] == samples:
            chosen = self.known(parameters, number)
            if number not in self._reported:
                notify(f"training.find_batch_size: {outcome(parameters, chosen)}, as in this run so far.")
        else:
            self._refuse_another(parameters, number)
            chosen, note = find_batch_size(parameters, mesh, graph, specs)
            self.found[str(number)] = [samples, chosen.training.batch_size]
            notify(note)
        self._reported.add(number)
        return self._with_smaller_batch_size(chosen, number, notify)

    def _with_smaller_batch_size(
        self, parameters: Parameters, number: int, notify: Callable[[str], None]
    ) -> Parameters:
        """As memory that ran out demands."""
        chosen = with_smaller_batch(parameters, self.largest)
        if chosen is not parameters and number not in self._told_smaller:
            notify(f"training.halve_batch_on_out_of_memory: {outcome(parameters, chosen)}.")
            self._told_smaller.add(number)
        return chosen

    def record(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"batch_sizes": self.found, **({} if self.largest is None else {"largest_batch": self.largest})}

    def restate(self, rounds: Sequence[Parameters], record: Mapping[str, Any], counters: Counters) -> list[str]:
        """Counts the steps of a checkpoint in the micro-batches of this run, if an update had others then; notes."""
        if not counters.step or counters.round >= len(rounds):
            return []
        now = self.known(rounds[counters.round], counters.round)
        is_elastic, before = now.distributed.elastic, record["parameters"]["training"]
        replicas = record["parameters"]["distributed"].get("data_parallel_size", 1) if is_elastic else 1
        old, size = before.get("gradient_accumulation_steps", 1), now.training.gradient_accumulation_steps
        samples = samples_of_update(now) * (now.distributed.data_parallel_size if is_elastic else 1)
        if (self.largest is None and not is_elastic) or old == size or replicas * before["batch_size"] * old != samples:
            return []
        step = counters.step
        counters.step, counters.ended_early_of = step * size // old, counters.ended_early_of * size // old
        return [
            f"step {step}, with {old} micro-batches of {before['batch_size']} samples an update, is step "
            f"{counters.step} with {size} of {now.training.batch_size} samples."
        ]

    def _refuse_another(self, parameters: Parameters, number: int) -> None:
        """A round that was begun counts its steps, which would mean something else."""
        if number != self.begun_round:
            return
        samples, size = self.found.get(str(number), (0, 0))
        begun = f"{size} samples, {samples // size} an update" if size else "the configured size"
        raise ParametersError(
            f"training.find_batch_size: the checkpoint is in round {number}, which was begun with micro-batches of "
            f"{begun}; now {samples_of_update(parameters)} samples would make an update. Keep the settings of the "
            "round until it ends."
        )

    def known(self, parameters: Parameters, number: int) -> Parameters:
        """Parameters of a round with the micro-batch that was found for it; as they are where none was."""
        samples, size = self.found.get(str(number), (0, 0))
        if parameters.training.find_batch_size and samples == samples_of_update(parameters):
            parameters = with_micro_batches(parameters, size)
        return with_smaller_batch(parameters, self.largest)

    def is_over(self, rounds: Sequence[Parameters], counters: Counters) -> bool:
        """Whether all steps of the present round are done, or a callback ended it when it had no more than now."""
        now = [self.known(one, counters.round).training for one in rounds[counters.round : counters.round + 1]]
        done = max(counters.step, counters.ended_early_of)
        return any(one.num_train_steps is not None and done >= one.num_train_steps for one in now)

    @classmethod
    def of_record(cls, record: Mapping[str, Any] | None) -> BatchSizes:
        """As a checkpoint keeps them; none where there is no checkpoint."""
        largest = largest_batch(record or {})
        if record is None:
            return cls(largest=largest)
        counters = record["counters"]
        return cls(
            found=dict(record.get("batch_sizes", {})),
            begun_round=counters["round"] if counters["step"] else None,
            largest=largest,
        )


def find_batch_size(
    parameters: Parameters, mesh: Mesh, graph: TrainingGraph, specs: Mapping[str, FeatureSpec]
) -> tuple[Parameters, str]:
    """The same run with the largest micro-batch that fits this rank's memory and those of all others, and a note.

    Args:
        parameters: of a round.
        mesh: all ranks; each calls this.
        graph: of the entire network, with its loss.
        specs: what the samples of the data have, where it is known.

    Raises:
        ParametersError: not even the smallest micro-batch fits, or the model fixes its batch.
    """
    limit = agree_on_least(mesh, memory_of_rank(parameters.machine.memory_gb, mesh.device))
    tries = mesh.world_size == 1 or _is_replicated(parameters)
    share = TRIED_SHARE if tries else UNTRIED_SHARE
    chosen, needs = find_by_forecast(parameters, mesh.topology, graph, specs, limit, share, mesh)
    how = f"forecast: {_gb(needs)} of {_gb(limit)} a rank"
    while tries:
        least = f"no micro-batch fits {_gb(limit)}"
        taken = trial_bytes(chosen, mesh, graph, specs)
        if agree_on_least(mesh, float(taken is not None and taken <= limit)):
            assert taken is not None
            how = f"tried: {_gb(taken)} of {_gb(limit)} a rank"
            break
        smaller = [size for size in micro_batch_sizes(parameters) if size < chosen.training.batch_size]
        if not smaller:
            told = "ran out of memory" if taken is None else f"took {_gb(taken)}"
            raise ParametersError(_too_small(f"{least}: one of {chosen.training.batch_size} samples {told} on trial"))
        chosen = with_micro_batches(parameters, smaller[-1])
    return chosen, f"training.find_batch_size: {outcome(parameters, chosen)} ({how})."


def find_by_forecast(
    parameters: Parameters,
    topology: Topology,
    graph: TrainingGraph,
    specs: Mapping[str, FeatureSpec],
    limit: float,
    share: float = UNTRIED_SHARE,
    mesh: Mesh | None = None,
) -> tuple[Parameters, float]:
    """The run with the largest micro-batch whose forecast stays below a share of `limit` bytes, and that forecast.

    Raises:
        ParametersError: not even the smallest does, or the model fixes its batch.
    """
    refuse_fixed_batch(
        parameters, graph, "training.find_batch_size", "set training.batch_size and find_batch_size: false"
    )
    needs: dict[int, float] = {}
    refusals: dict[int, ParametersError] = {}

    def fits(size: int) -> bool:
        smaller = with_micro_batches(parameters, size)
        try:
            needs[size] = peak_bytes(smaller, graph, specs, topology)
        except ParametersError as error:  # no stages of this size can be cut (distributed.stage_memory_gb)
            refusals[size] = error
        is_below = size in needs and needs[size] <= share * limit
        # Ranks whose parts are of unequal sizes would continue in different ways, and wait for each other for ever.
        return is_below if mesh is None else bool(agree_on_least(mesh, float(is_below)))

    sizes = micro_batch_sizes(parameters)
    found = largest_that_fits(sizes, fits)
    if found is None:
        if sizes[0] in refusals:
            raise refusals[sizes[0]]
        least = f"no micro-batch fits {_gb(limit)}: by the forecast, one of {sizes[0]} samples needs"
        raise ParametersError(_too_small(f"{least} {_gb(needs[sizes[0]])}"))
    return with_micro_batches(parameters, found), needs[found]


def peak_bytes(
    parameters: Parameters,
    graph: TrainingGraph,
    specs: Mapping[str, FeatureSpec],
    topology: Topology | None = None,
    pipelines: Sequence[int] | None = None,
) -> float:
    """The forecast peak memory of the rank that needs most, of those at some places in a pipeline or of all; of one
    process without a topology."""
    plan = plan_run(parameters, topology or Topology(), graph, specs)
    found = forecast(parameters, graph, plan, specs, pipelines=pipelines, counts=False)
    return max(rank.memory.total for rank in found.ranks)


def has_fixed_batch(parameters: Parameters, graph: TrainingGraph) -> bool:
    """Whether the model, or `training.mapped_dimensions`, fixes the batch."""
    mapped = parameters.training.mapped_dimensions
    _, shapes = input_types(graph)
    return any(shape and not (isinstance(shape[0], str) and shape[0] not in mapped) for shape in shapes.values())


def _is_replicated(parameters: Parameters) -> bool:
    """Whether a rank can try a step by itself: it holds the entire network."""
    split = parameters.distributed
    return split.horizontal_parallel_size * split.pipeline_parallel_size == 1 and split.zero_stage == 0


def refuse_fixed_batch(parameters: Parameters, graph: TrainingGraph, field: str, otherwise: str) -> None:
    """Refuses to choose a micro-batch where the model, or `training.mapped_dimensions`, fixes it.

    Args:
        parameters, graph: of the run.
        field: that asks for the choice.
        otherwise: what to set in order to do without it.

    Raises:
        ParametersError: it is fixed.
    """
    mapped = parameters.training.mapped_dimensions
    _, shapes = input_types(graph)
    for name, shape in shapes.items():
        if not shape or (isinstance(shape[0], str) and shape[0] not in mapped):
            continue
        if isinstance(shape[0], str):
            fixed = f"{mapped[shape[0]]} in training.mapped_dimensions"
            advice = f"Remove {shape[0]!r} there: it follows training.batch_size"
        else:
            fixed, advice = f"{shape[0]} in the model", "Export the model with that dimension dynamic"
        raise ParametersError(
            f"{field}: the batch of input {name!r} is fixed to {fixed}, so no other micro-batch can be tried. "
            f"{advice}, or {otherwise}."
        )


def outcome(asked: Parameters, chosen: Parameters) -> str:
    """What a run has instead of what was asked for, in words."""
    one, other = asked.training, chosen.training
    if one.batch_size == other.batch_size:
        return f"micro-batches of {one.batch_size} samples, {one.gradient_accumulation_steps} an update, as asked"
    text = (
        f"micro-batches of {other.batch_size} samples, {other.gradient_accumulation_steps} an update, instead of "
        f"{one.batch_size} and {one.gradient_accumulation_steps}"
    )
    if one.num_train_steps is not None:
        text += f"; so num_train_steps is {other.num_train_steps} instead of {one.num_train_steps}"
    if one.evaluation_period:
        text += f", evaluation_period {other.evaluation_period} instead of {one.evaluation_period}"
    return text


def _too_small(what: str) -> str:
    return (
        f"training.find_batch_size: {what}. Save memory by recompute, mixed_precision or distributed.zero_stage, shard "
        "the network over more ranks, or raise machine.memory_gb if there is more memory than that."
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
