"""`TrainingRound`: the steps of a round; between two of them evaluations, checkpoints, and what callbacks and signals
request."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from onward.checkpoint.run_checkpoints import can_save
from onward.data.augmentation import augmented
from onward.data.batches import Batch, BatchSource
from onward.engine.building.preparation import check_dimensions, check_step, run_start
from onward.engine.building.rounds import round_steps
from onward.engine.callbacks import Control
from onward.engine.evaluating.early_stopping import NOTHING_TO_COMPARE
from onward.engine.faults.loss_spikes import LossSpikes, without_spans
from onward.engine.faults.preemption import GracePeriod
from onward.engine.faults.skipped_updates import SkippedUpdates
from onward.engine.interruption import StopRequest
from onward.engine.loop import Clock, StepDone, closing_batches, is_due, summarize
from onward.engine.reports import RunSummary, StepReport
from onward.engine.steering import Steering
from onward.errors import ParametersError
from onward.graph.reading.garbage_collection import gc_frozen
from onward.operating_system import usable_cores
from onward.parallel.rendezvous.launcher import ranks_on_this_machine
from onward.parameters.averaging import notes_on_averaging
from onward.report.profiler import profiled
from onward.report.requeue import ended_by, interrupted
from onward.run import Run

ANOTHER = "a signal to another process"

MOST_IMAGE_THREADS = 8
"""That vary images beside training; with fewer cores, one core is left to training."""


class TrainingRound:
    """One round of a run: `num_train_steps` steps, or what is left of them after a resume.

    Args:
        run: what trains, with the parameters of the round.
        test_data: evaluated every `evaluation_period` steps; None: nothing is evaluated.
        dimensions: symbolic dimension of the inputs -> the size that the data must have.
        returns_on_interrupt: Ctrl-C ends the round as a callback would, instead of raising.
        evaluates_at_end: evaluate after the last step, before the summary, also without an `evaluation_period`.

    Raises:
        ParametersError: dimensions, test data or the step of a resume do not fit the parameters.
        StorageError: checkpoints cannot be written where they are to go.
    """

    def __init__(
        self,
        run: Run,
        test_data: BatchSource | None,
        dimensions: Mapping[str, int],
        returns_on_interrupt: bool,
        evaluates_at_end: bool = False,
    ) -> None:
        training, settings, self._started = run.parameters.training, run.parameters.checkpoint, time.perf_counter()
        self.run, self.watchers, self.state = run, run.watchers, run.state
        self.begin, self.clock = dataclasses.replace(run.state.counters), Clock()
        self.returns_on_interrupt, self.evaluates_at_end = returns_on_interrupt, evaluates_at_end
        run.evaluation = (None, None)
        if settings.checkpoints_dir is not None:
            run.checkpoints.open(settings)  # where nothing can be saved, nothing is worth training
            run.checkpoints.open_memory(run.state)
        self.test_data = None if training.skip_evaluation else test_data
        if self.test_data is not None:
            run.evaluator.check_specs(self.test_data.feature_specs())
        elif run.best is not None:
            raise ParametersError(NOTHING_TO_COMPARE)
        changed = check_step(training, self.begin)
        changed = None if run.keeps_updates else changed
        check_dimensions(dimensions, run.graph)
        self.dimensions = {**training.mapped_dimensions, **dimensions}
        self.grace = GracePeriod.of(run.parameters, run.mesh.world_size, self.clock)
        net = run.state.networks[0].net
        control = Control(run.parameters, net, run.state.rate, self.test_data is not None)
        self.watchers.on_run_start(run_start(training, run.state), control)
        if changed is not None:
            self.watchers.on_message(changed)
        self.watchers.on_messages(_notes_on_averaging(run))
        self.between = Steering(run.state, control)

    def train(self, data: BatchSource) -> RunSummary:
        """Trains to the end of the round, or until something ends it.

        Raises:
            RollBack: the loss has a spike that is to be gone back from.
            Interrupted: a signal came; the state is saved.
        """
        run, between, training = self.run, self.between, self.run.parameters.training
        settings, on_bad_loss = run.parameters.checkpoint, run.parameters.on_bad_loss
        skips = SkippedUpdates(self.state, on_bad_loss.skip, self.watchers.on_message)
        spikes, reports = LossSpikes(self.state, on_bad_loss), list[StepReport]()
        spikes.before_round(run.save)
        saving = run.checkpoints.saving_after_failure(settings, self.state, run.save)
        with StopRequest(settings.on_sigusr1 == "stop", self.returns_on_interrupt) as stop, gc_frozen(), saving:
            with closing_batches(self._batches(data)) as read:
                batches = self.watchers.announced(without_spans(read, self.state))
                for done in self._steps(between.not_skipped(batches, self.watchers)):
                    self.watchers.on_step_done(done, self.state)
                    if done.report is not None:
                        reports = [*reports[:1], done.report]
                        self._keep_first_loss(done.report)
                    skips.after_step(done)
                    spikes.after_step(done, lambda: between.is_interrupted_at_end(stop.signal_name is not None))
                    if self._is_stopped(done, stop):
                        self.state.counters.ended_early_of = 0 if stop.returns else training.steps  # 0: to be resumed
                        self._end_early()
                        break
            checkpoint = run.save_last_of_round()
        stopped, evaluated = between.stop_reason, run.evaluation[1]
        metrics = {} if evaluated is None else dict(evaluated.metrics)
        first_loss = self.state.course.first_loss
        run.finish_round()
        seconds, counters = time.perf_counter() - self._started, self.state.counters
        summary = summarize(training, self.begin, counters, self.clock, reports, metrics, seconds, checkpoint, stopped)
        summary = dataclasses.replace(summary, first_loss_of_round=first_loss)
        self.watchers.on_end(summary)
        skips.at_end()
        if between.is_interrupted_at_end(between.raises(stop)) and checkpoint is not None:
            raise interrupted(stop.signal_name or ANOTHER, "at the end of the round", checkpoint)
        return summary

    def _end_early(self) -> None:
        """Synchronizes workers of local SGD as after the last step, and evaluates what that makes of the weights.

        All ranks get here after the same update. A run that is interrupted does not: it resumes where it was.
        """
        is_evaluated = self.run.parameters.training.evaluation_period > 0 or self.evaluates_at_end
        if self.state.end_round_early() and is_evaluated and self.test_data is not None:
            self.run.evaluate(self.test_data)

    def _keep_first_loss(self, report: StepReport) -> None:
        """For the summary of a run that is resumed."""
        if not self.begin.step and self.state.course.first_loss is None and math.isfinite(report.loss):
            self.state.course.first_loss = report.loss

    def _batches(self, data: BatchSource) -> Iterator[Batch]:
        """Batches from where the run is, their images varied where that is asked for."""
        parameters = self.run.parameters
        read = data.batches(parameters.training.batch_size, self.state.cursor)
        names = self.run.graph.loss_names
        labels = () if names is None else names.labels
        threads = max(1, min(MOST_IMAGE_THREADS, usable_cores() // ranks_on_this_machine() - 1))
        return augmented(read, parameters.augmentation, labels, parameters.training.seed, threads)

    def _steps(self, batches: Iterator[Batch]) -> Iterator[StepDone]:
        """The steps of the round; those that the user asked for under the profiler."""
        run, parameters = self.run, self.run.parameters
        make = functools.partial(
            round_steps, parameters, run.assembly, self.dimensions, run.feature_ranges, batches, self.clock
        )
        folder = (parameters.paths.output_dir or Path()) / "profile"
        return profiled(parameters, folder, self.state, make, self.watchers.on_message)

    def _is_stopped(self, done: StepDone, stop: StopRequest) -> bool:
        """Evaluates and saves after a step, as parameters, callbacks and signals ask; whether a callback stops."""
        run, between, test_data = self.run, self.between, self.test_data
        settings, training = run.parameters.checkpoint, run.parameters.training
        is_last_step = done.step == training.steps
        is_end = is_last_step and (training.evaluation_period > 0 or self.evaluates_at_end)
        is_evaluated = test_data is not None and (is_due(done.step, training.evaluation_period) or is_end)
        if is_evaluated and test_data is not None:
            run.evaluate(test_data)
        self.grace.save_seconds = run.checkpoints.save_seconds
        if self.grace.has_no_time_for_update(done, stop):
            self.state.return_to_mark()
            raise ended_by(stop.signal_name or ANOTHER, self.state.counters.step, run.save_last_of_round())
        if not done.is_update:
            return False
        self.watchers.on_messages(filter(None, [self.grace.shortage()]))
        saves = stop.take_save() and can_save(settings, done.step, self.watchers.on_message)
        decision = between.after_update(between.raises(stop), saves)
        if decision.evaluates and not is_evaluated and test_data is not None:
            run.evaluate(test_data)
        # The end of the round saves anyway.
        is_due_to_save = not is_last_step and is_due(self.state.counters.update, settings.checkpoint_period)
        if is_evaluated or is_due_to_save or decision.saves or decision.evaluates:
            decision |= between.now()
        if (is_due_to_save or decision.saves) and not (is_last_step or decision.is_stopped):
            run.save()
        elif not is_last_step and is_due(self.state.counters.update, settings.memory_period_updates):
            run.save_in_memory()
        if decision.is_interrupted:
            raise ended_by(stop.signal_name or ANOTHER, done.step, run.save_last_of_round())
        return decision.is_stopped


def _notes_on_averaging(run: Run) -> list[str]:
    """Of a round that is too short for the average it keeps."""
    training, counters, average = run.parameters.training, run.state.counters, run.state.average
    end = counters.update + (training.steps - counters.step) // training.gradient_accumulation_steps
    return [] if average is None else notes_on_averaging(average.settings, average.count, counters.update, end)
