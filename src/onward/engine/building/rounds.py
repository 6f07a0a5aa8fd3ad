"""The steps of one round, made from the parameters of the round and from what a rank trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from onward.data.batches import Batch
from onward.engine.building.assembly import Assembly
from onward.engine.building.preparation import watched_names
from onward.engine.faults.integrity import IntegrityWatch
from onward.engine.faults.out_of_memory import explaining_out_of_memory
from onward.engine.faults.recomputation import RecomputationWatch
from onward.engine.faults.slow_ranks import SlowRanks
from onward.engine.inputs.index_ranges import FeatureRange
from onward.engine.inputs.loss_normalization import LossNormalization
from onward.engine.loop import Clock, StepDone, train_steps
from onward.engine.micro_batches import SequentialMicroBatches
from onward.engine.steps import Steps
from onward.engine.update_in_backward import UpdateInBackward
from onward.graph.weights.branches import note_on_missing_gradients
from onward.lowering.program import Program
from onward.optim.schedules import LearningRateSchedule
from onward.parallel.watch.waiting import WaitClock
from onward.parameters import Parameters


def make_steps(
    parameters: Parameters,
    assembly: Assembly,
    dimensions: Mapping[str, int],
    feature_ranges: Mapping[str, FeatureRange],
    instrument: Callable[[Program], Program] | None = None,
    report_missing: Callable[[Sequence[str]], None] | None = None,
) -> Steps:
    """The step modes as the parameters ask for them, for whatever trains: a round, a range test, a trial.

    Args:
        parameters: of the round.
        assembly: what is trained.
        dimensions: sizes that symbolic dimensions of the inputs must have.
        feature_ranges: features that are class labels or pick rows -> which there are.
        instrument: gives the program to call instead of one (a profiler's twin).
        report_missing: called once, after the first update, with the weights that got no gradient, if any.
    """
    state, graph = assembly.state, assembly.graph
    assert graph.loss_names is not None
    watched = watched_names(parameters.tensorboard, graph)
    training, may_differ = parameters.training, parameters.data.last_batch == "short"
    shares = LossNormalization(state.mesh, parameters.loss, graph.loss_names, training, may_differ)
    is_summed = parameters.loss.reduction == "sum" and training.accumulate_as == "one_batch"
    in_backward = UpdateInBackward(state) if parameters.speed.update_in_backward else None
    backward = torch.autograd.backward if in_backward is None else in_backward.backward
    return Steps(
        state,
        assembly.micro_batches(shares, watched.values, dimensions, feature_ranges, instrument, backward),
        training.gradient_accumulation_steps,
        parameters.optimizer.max_norm_clip,
        watched,
        assembly.reduction,
        report_missing,
        parameters.loss.reduction == "sum",
        assembly.unfreezing,
        is_summed,
        in_backward,
    )


def round_steps(
    parameters: Parameters,
    assembly: Assembly,
    dimensions: Mapping[str, int],
    feature_ranges: Mapping[str, FeatureRange],
    batches: Iterator[Batch],
    clock: Clock,
    instrument: Callable[[Program], Program] | None = None,
) -> Iterator[StepDone]:
    """Trains the steps of a round that are left, one for each item.

    Args:
        parameters: of the round.
        assembly: what is trained.
        dimensions: sizes that symbolic dimensions of the inputs must have.
        feature_ranges: features that are class labels or pick rows -> which there are.
        batches: of this replica, from where the round is.
        clock: counts times and samples.
        instrument: gives the program to call instead of one (a profiler's twin).
    """
    training, state, graph = parameters.training, assembly.state, assembly.graph

    def report_missing(names: Sequence[str]) -> None:
        assembly.notify(note_on_missing_gradients(names, len(state.weights), graph.known_as))

    reports = None if state.counters.round else report_missing
    steps = make_steps(parameters, assembly, dimensions, feature_ranges, instrument, reports)
    schedule = LearningRateSchedule(parameters.learning_rate, parameters.training.steps)
    clock.utilization = assembly.utilization
    if parameters.machine.check_computation_period:
        assert isinstance(steps.micro_batches, SequentialMicroBatches)
        batches = RecomputationWatch(state, steps.micro_batches, parameters).inspected(batches)
    trained = train_steps(steps, batches, schedule, training.steps, training.display_loss_steps, clock)
    trained = explaining_out_of_memory(trained, parameters, state)
    distributed, machine = parameters.distributed, parameters.machine
    waits = WaitClock(state.device, assembly.modules)
    period, ratio = distributed.slow_rank_period, distributed.slow_rank_ratio
    trained = SlowRanks(state, waits, clock, period, ratio, assembly.notify).watched(trained)
    return IntegrityWatch(state, machine.check_weights_period, machine.deterministic).watched(trained)
