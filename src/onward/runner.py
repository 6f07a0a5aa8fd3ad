"""`TrainingRunner`: the whole story of a run, read from top to bottom.

Read the model and add the loss, build the network and its optimizer, load a checkpoint; train, evaluate, save;
write the trained model.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.artifacts.trained_model import export_run, rehearse_export_of_run, trained_model_path, write_graphs_if_asked
from onward.checkpoint.run_checkpoints import RunCheckpoints, can_save
from onward.checkpoint.run_files import localize
from onward.data.batches import Batch, BatchSource, DataCursor
from onward.data.shard import FeatureSpec
from onward.engine.building.assembly import Assembly, assemble
from onward.engine.building.preparation import (
    check_dimensions,
    check_step,
    label_ranges,
    make_folders,
    make_loss_scale,
    plan_run,
    read_training_graph,
    run_start,
    seed_random,
    watched_names,
    write_loss_model,
)
from onward.engine.building.rounds import round_steps
from onward.engine.callbacks import Control, check_watchers
from onward.engine.evaluating.early_stopping import NOTHING_TO_COMPARE, best_evaluation
from onward.engine.evaluating.evaluation import Evaluator
from onward.engine.faults.digests import digests_of
from onward.engine.faults.loss_spikes import LossSpikes, RollBack, without_spans
from onward.engine.faults.preemption import GracePeriod
from onward.engine.faults.skipped_updates import SkippedUpdates, refuse_untrained_run
from onward.engine.forecast.batch_size import BatchSizes
from onward.engine.functions import MetricFunction
from onward.engine.inputs.epochs import count_in_steps, count_in_steps_of
from onward.engine.inputs.run_data import RunData
from onward.engine.interruption import StopRequest
from onward.engine.loop import Clock, StepDone, closing_batches, is_due, summarize
from onward.engine.reports import CheckpointReport, EvaluationReport, RunSummary, StepReport, Watcher
from onward.engine.state import TrainState
from onward.engine.steering import Steering
from onward.environment import Environment
from onward.errors import DataError, OnwardError, ParametersError
from onward.graph.reading.garbage_collection import gc_frozen
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import OnnxModule
from onward.optim.building import unmatched_rules
from onward.optim.schedules import RateAdjustment
from onward.parallel.agreement import check_same
from onward.parallel.launch.process import Mesh, start
from onward.parameters import Parameters, check
from onward.parameters.checks import fixed_fields_changed
from onward.parameters.effects import fields_without_effect
from onward.report.profiler import profiled
from onward.report.requeue import ended_by, interrupted
from onward.report.run_watchers import RunWatchers
from onward.report.watching import Watchers

ANOTHER = "a signal to another process"
_NOT_EVALUATED: tuple[BatchSource | None, EvaluationReport | None] = (None, None)


class TrainingRunner:
    """Trains an ONNX model as `Parameters` say: `initialize`, `run` (once or for several rounds), `end_training`.

    Args:
        parameters: what is asked for; checked in full here, before any work.
        environment: the machine.
        watchers: who is told of every event; more can be added to `watchers` later.
        mesh: the processes, where they have found each other already; else `initialize` finds them.
        progress: show progress on the console, or in the notebook.
        metrics: what evaluations compute besides, as functions of (outputs, batch).
        returns_on_interrupt: of one process, on Ctrl-C `run` saves and returns as if a callback had stopped it.

    Raises:
        ParametersError: with every field that is wrong.
    """

    def __init__(
        self,
        parameters: Parameters,
        environment: Environment | None = None,
        watchers: Sequence[Watcher] = (),
        mesh: Mesh | None = None,
        *,
        progress: bool = True,
        metrics: Mapping[str, MetricFunction] | None = None,
        returns_on_interrupt: bool = False,
    ) -> None:
        self.parameters, self.files = localize(check(parameters))
        self.environment = Environment() if environment is None else environment
        check_watchers(watchers)
        self.watchers = Watchers(watchers)
        self._own_watchers = RunWatchers(self.watchers, self.parameters)
        self._shows_progress, self._metrics = progress, dict(metrics or {})
        self._mesh, self._returns_on_interrupt = mesh, returns_on_interrupt
        if mesh is not None:
            self._own_watchers.begin(mesh.rank, progress)
        self._assembly: Assembly | None = None
        self.resumed_update: int | None = None
        self.run_file: Path | None = None
        self._data, self._ended_step, self._evaluated = RunData(self.watchers.on_message), 0, _NOT_EVALUATED

    def initialize(self, feature_specs: Mapping[str, FeatureSpec] | None = None) -> None:
        """Reads the model, adds the loss, builds network and optimizer, loads a checkpoint if there is one.

        Args:
            feature_specs: of the training data, where they are known already (`training_data_loader.feature_specs()`);
                a plan for several processes takes sizes from them that are open in the model.

        Raises:
            ModelError: the model cannot be read, lowered or trained as asked.
            CheckpointError: the checkpoint is broken or of another model.
            StorageError: the output directory cannot be made.
        """
        self.environment.apply()
        self._join()
        make_folders(self.parameters)
        self.watchers.on_phase("reading the model")
        graph = read_training_graph(self.parameters)
        write_loss_model(self.parameters, self.mesh.rank)
        self._graph = graph
        check_same(self.mesh, digests_of(self.parameters, graph))
        self.watchers.on_messages((*fields_without_effect(self.parameters, refused=False), *graph.notes))
        self._label_ranges = label_ranges(self.parameters.loss, graph)
        self._settle_batch_size(0, feature_specs or {})
        self.watchers.on_phase("building the network")
        plan = plan_run(self.parameters, self.mesh.topology, graph, feature_specs or {})
        self._assembly = assemble(self.parameters, self.mesh, graph, plan, self.watchers.on_message)
        self.watchers.on_messages(dict.fromkeys(self._assembly.notes))
        self._evaluator = Evaluator(self.parameters, self._assembly, self._label_ranges, self._metrics)
        self.best = best_evaluation(self.parameters, self._evaluator)
        self.watchers.add([] if self.best is None else [self.best])
        for pattern in unmatched_rules(self.parameters.optimizer, graph.weights, graph.known_as):
            self.watchers.on_message(f"optimizer_attributes: {pattern!r} matches no weight.")
        self._check_names()
        self.watchers.on_phase("looking for a checkpoint to load")
        self._load_checkpoint()
        self.watchers.on_phase("rehearsing the export of the trained model")
        rehearse_export_of_run(self.parameters, self.state, self._graph)
        self._own_watchers.open_files(self.parameters, self.environment, self.mesh, self.run_file, self.resumed_update)
        write_graphs_if_asked(self.parameters, self.state, self._graph, self.watchers.on_message)
        self.watchers.on_phase(None)

    def _settle_batch_size(self, number: int, specs: Mapping[str, FeatureSpec]) -> None:
        """Steps of a round given in epochs, and its micro-batch, where it is to be found."""
        say = self.watchers.on_message
        self.parameters = count_in_steps(self.parameters, self.mesh.topology.data_size, say)
        self.parameters = self._batch_sizes.settle(self.parameters, number, self.mesh, self._graph, specs, say)

    def _join(self) -> None:
        """Finds the other processes, and draws other random numbers than they where they see other samples."""
        if self._mesh is None:
            kind, folder = self.environment.device_kind, self.parameters.paths.output_dir
            self._mesh = start(self.parameters.distributed, kind, folder)
        self._own_watchers.begin(self.mesh.rank, self._shows_progress)
        self._checkpoints = RunCheckpoints(self.mesh, self.files, self.watchers.on_message)
        self._batch_sizes = BatchSizes.of_record(self._checkpoints.record(self.parameters.checkpoint))
        seed_random(self.parameters.training.seed, self.mesh)

    def _check_names(self) -> None:
        """What parameters name of the graph must be in it."""
        watched_names(self.parameters.tensorboard, self._graph)
        check_dimensions(self.parameters.training.mapped_dimensions, self._graph)

    def _load_checkpoint(self) -> None:
        if (notes := self._checkpoints.resume(self.parameters.checkpoint, self.state)) is None:
            return
        rounds = (self.parameters, *self.parameters.next_rounds)
        record, counters = self._checkpoints.record(self.parameters.checkpoint) or {}, self.state.counters
        self.watchers.on_messages([*notes, *self._batch_sizes.restate(rounds, record, counters)])
        self.watchers.restore(record.get("callbacks", {}))
        self.resumed_update = counters.update
        # A round is saved with its last step. Asked for more steps than that, it goes on; else it is over.
        if self._batch_sizes.is_over(rounds, counters):
            self._finish_round()

    @property
    def state(self) -> TrainState:
        """All that changes while the run trains."""
        if self._assembly is None:
            raise OnwardError("TrainingRunner is not initialized; call initialize() first.")
        return self._assembly.state

    @property
    def mesh(self) -> Mesh:
        """All processes of the run, and this one's place among them."""
        if self._mesh is None:
            raise OnwardError("TrainingRunner is not initialized; call initialize() first.")
        return self._mesh

    @property
    def graph(self) -> TrainingGraph:
        """What is trained, whole, with its loss."""
        return self._graph

    @property
    def net(self) -> OnnxModule:
        """The network as this process holds it; in a world of one, its `weights` are the fp32 masters."""
        return self.state.networks[0].net

    @property
    def round(self) -> int:
        """Rounds finished so far; after a resume, the round to go on with."""
        return self.state.counters.round

    def update_parameters(self, parameters: Parameters, feature_specs: Mapping[str, FeatureSpec] | None = None) -> None:
        """Takes other parameters for the next round: data, batch sizes, steps, learning rate, reports, checkpoints.

        Args:
            parameters: of the next round.
            feature_specs: of its training data, for `training.find_batch_size`.

        Raises:
            ParametersError: they are wrong in themselves, or change what is built already: model, loss, weights to
                train, optimizer or precision.
        """
        parameters = self.files.localized(check(parameters))
        if changed := fixed_fields_changed(self.parameters, parameters):
            raise ParametersError(
                f"{', '.join(changed)} cannot change between rounds of one run; start another TrainingRunner."
            )
        self.parameters = parameters
        if self._assembly is not None:
            self._settle_batch_size(self.round, feature_specs or {})
            self._check_names()

    def reset_loss_scale(self) -> None:
        """Puts the loss scale back to where a run begins, as between two phases of pre-training."""
        self.state.loss_scale = make_loss_scale(self.parameters)

    def run(
        self,
        training_data_loader: Any,
        test_data_loader: Any = None,
        mapped_dimensions: Mapping[str, int] | None = None,
    ) -> RunSummary:
        """Trains one round: `num_train_steps` steps, or what is left of them after a resume.

        Args:
            training_data_loader: where training batches come from: an `onward.DataLoader`, or data of any kind that
                `onward.fit` takes.
            test_data_loader: evaluated every `evaluation_period` steps; None: nothing is evaluated.
            mapped_dimensions: symbolic dimension -> size, checked against the data; shapes are otherwise taken
                from the batches.

        Raises:
            Interrupted: a signal came; the state is saved.
            DataError: the data are broken or do not fit.
            StorageError: a checkpoint cannot be written.
        """
        if training_data_loader is None:
            raise DataError("run() needs a training data loader; to evaluate alone, call end_training(test_loader).")
        try:
            test_data = None if test_data_loader is None else self._open(test_data_loader, is_test=True)
            data, settings = self._open(training_data_loader), self.parameters.checkpoint
            while True:
                try:
                    return self._run_round(data, test_data, mapped_dimensions or {})
                except RollBack as spike:
                    path = self._checkpoints.roll_back(settings, self.state, spike, self.watchers.restore)
                    self.watchers.on_roll_back(spike.to(self.files.shown(path), self.state.counters.update))
                    if spike.is_interrupted:
                        raise interrupted(ANOTHER, "at a spike of the loss", self.files.shown(path)) from None
        except BaseException as error:
            self._own_watchers.leave_screen()
            self.watchers.on_exception(error)
            self._own_watchers.finish(error)
            raise

    def _open(self, data: Any, is_test: bool = False) -> BatchSource:
        """The source of batches over data of any kind; the same for the same data."""
        return self._data.open(data, is_test, self.parameters, self.mesh, self._graph)

    def _run_round(self, data: BatchSource, test_data: BatchSource | None, dimensions: Mapping[str, int]) -> RunSummary:
        started = time.perf_counter()
        self.parameters = count_in_steps_of(self.parameters, data, self.mesh, self.watchers.on_message)
        training, begin = self.parameters.training, dataclasses.replace(self.state.counters)
        clock, reports, self._evaluated = Clock(), list[StepReport](), _NOT_EVALUATED
        if self.parameters.checkpoint.checkpoints_dir is not None:
            self._checkpoints.open(self.parameters.checkpoint)  # where nothing can be saved, nothing is worth training
        test_data = None if training.skip_evaluation else test_data
        if test_data is not None:
            self._evaluator.check_specs(test_data.feature_specs())
        elif self.best is not None:
            raise ParametersError(NOTHING_TO_COMPARE)
        check_step(training, begin.step)
        check_dimensions(dimensions, self._graph)
        self._dimensions = {**training.mapped_dimensions, **dimensions}
        control = Control(self.parameters, self.net, self.state.rate, test_data is not None)
        self.watchers.on_run_start(run_start(training, self.state), control)
        between = Steering(self.state, control)
        skips = SkippedUpdates(self.state, self.parameters.on_bad_loss.skip, self.watchers.on_message)
        settings, spikes = self.parameters.checkpoint, LossSpikes(self.state, self.parameters.on_bad_loss)
        spikes.before_round(self.save_checkpoint)
        saving = self._checkpoints.saving_after_failure(settings, self.state, self.save_checkpoint)
        self._grace = GracePeriod.of(self.parameters, self.mesh.world_size, clock)
        returns = self._returns_on_interrupt and self.mesh.world_size == 1
        with StopRequest(settings.on_sigusr1 == "stop", returns) as stop, gc_frozen(), saving:
            with closing_batches(data.batches(training.batch_size, self.state.cursor)) as read:
                batches = self.watchers.announced(without_spans(read, self.state))
                for done in self._steps(between.not_skipped(batches, self.watchers), clock):
                    self.watchers.on_step_done(done, self.state)
                    reports = reports if done.report is None else [*reports[:1], done.report]
                    skips.after_step(done)
                    spikes.after_step(done, lambda: between.is_interrupted_at_end(stop.signal_name is not None))
                    if self._is_stopped(done, between, stop, test_data):
                        self.state.counters.ended_early_of = 0 if stop.returns else training.steps  # 0: to be resumed
                        break
            checkpoint = self._save_last_of_round()
        stopped, metrics = between.stop_reason, dict(self._evaluated[1].metrics) if self._evaluated[1] else {}
        self._finish_round()
        seconds = time.perf_counter() - started
        summary = summarize(training, begin, self.state.counters, clock, reports, metrics, seconds, checkpoint, stopped)
        self.watchers.on_end(summary)
        skips.at_end()
        if between.is_interrupted_at_end(between.raises(stop)) and checkpoint is not None:
            raise interrupted(stop.signal_name or ANOTHER, "at the end of the round", checkpoint)
        return summary

    def _is_stopped(self, done: StepDone, between: Steering, stop: StopRequest, test_data: BatchSource | None) -> bool:
        """Evaluates and saves after a step, as parameters, callbacks and signals ask; whether a callback stops."""
        settings, training = self.parameters.checkpoint, self.parameters.training
        is_end = training.evaluation_period > 0 and done.step == training.steps
        is_evaluated = test_data is not None and (is_due(done.step, training.evaluation_period) or is_end)
        if is_evaluated and test_data is not None:
            self.evaluate(test_data)
        self._grace.save_seconds = self._checkpoints.save_seconds
        if self._grace.has_no_time_for_update(done, stop):
            self.state.return_to_mark()
            raise ended_by(stop.signal_name or ANOTHER, self.state.counters.step, self._save_last_of_round())
        if not done.is_update:
            return False
        self.watchers.on_messages(filter(None, [self._grace.shortage()]))
        saves = stop.take_save() and can_save(settings, done.step, self.watchers.on_message)
        decision = between.after_update(between.raises(stop), saves)
        if decision.evaluates and not is_evaluated and test_data is not None:
            self.evaluate(test_data)
        is_last_step = done.step == self.parameters.training.steps  # the end of the round saves anyway
        is_due_to_save = not is_last_step and is_due(self.state.counters.update, settings.checkpoint_period)
        if is_evaluated or is_due_to_save or decision.saves or decision.evaluates:
            decision |= between.now()
        if (is_due_to_save or decision.saves) and not (is_last_step or decision.is_stopped):
            self.save_checkpoint()
        if decision.is_interrupted:
            raise ended_by(stop.signal_name or ANOTHER, done.step, self._save_last_of_round())
        return decision.is_stopped

    def _finish_round(self) -> None:
        """The next round starts with step 0, at the beginning of its data."""
        counters = self.state.counters
        self._ended_step = counters.step
        counters.round += 1
        counters.step = counters.samples = counters.ended_early_of = 0
        self.state.cursor, self.state.rate = DataCursor(), RateAdjustment()

    def _steps(self, batches: Iterator[Batch], clock: Clock) -> Iterator[StepDone]:
        """The steps of the round; those that the user asked for under the profiler."""
        assert self._assembly is not None
        make = functools.partial(
            round_steps, self.parameters, self._assembly, self._dimensions, self._label_ranges, batches, clock
        )
        folder = (self.parameters.paths.output_dir or Path()) / "profile"
        return profiled(self.parameters, folder, self.state, make, self.watchers.on_message)

    def evaluate(self, test_data_loader: Any) -> EvaluationReport:
        """Means over the entire test set, with the weights as they are now; data of any kind that `run` takes."""
        test_data_loader = self._open(test_data_loader, is_test=True)
        started, state, training = time.perf_counter(), self.state, self.parameters.training
        self.watchers.on_phase("evaluating")
        batches = test_data_loader.one_pass(training.eval_batch_size or training.batch_size)
        metrics, samples = self._evaluator.evaluate(state, batches)
        (step, in_round), seconds = self._shown_step(), time.perf_counter() - started
        report = EvaluationReport(step, self.state.counters.update, in_round, metrics, samples, seconds)
        self.watchers.on_phase(None)
        self.watchers.on_evaluation(report)
        self._evaluated = (test_data_loader, report)
        return report

    def _shown_step(self) -> tuple[int, int]:
        """Step and round for a report; after a round has ended, its last step rather than step 0 of the next."""
        counters = self.state.counters
        if counters.step == 0 and counters.round > 0:
            return self._ended_step, counters.round - 1
        return counters.step, counters.round

    def save_checkpoint(self) -> Path:
        """Starts a checkpoint of the present state; training may go on at once."""
        state, started = self.state, time.perf_counter()
        best = None if self.best is None else self.best.kept_update
        path = self._checkpoints.save(self.parameters, state, self._batch_sizes.record(), self.watchers.states(), best)
        step, stall = self._shown_step()[0], time.perf_counter() - started
        self.watchers.on_checkpoint(CheckpointReport(step, state.counters.update, self.files.shown(path), stall))
        return path

    def _save_last_of_round(self) -> str | None:
        if self.parameters.checkpoint.checkpoints_dir is None:
            return None
        path = self.save_checkpoint()
        self._checkpoints.wait()
        return self.files.shown(path)

    def end_training(self, test_data_loader: Any = None) -> EvaluationReport | None:
        """Evaluates once more, if there is a test loader, and writes the trained model to `output_dir`."""
        update, report = self.state.counters.update, None
        if test_data_loader is not None and not self.parameters.training.skip_evaluation:
            test_data_loader = self._open(test_data_loader, is_test=True)
            loader, report = self._evaluated
            if report is None or loader is not test_data_loader or report.update != update:
                report = self.evaluate(test_data_loader)
        self._checkpoints.close()
        refuse_untrained_run(self.state)
        if self.parameters.paths.output_dir is not None:
            what = export_run(self.parameters, self.state, self._graph, self.trained_model_path, self.best, report)
            self.files.publish()
            self._own_watchers.on_trained_model(what, self.files.shown(self.trained_model_path))
        self._data.close()
        self._own_watchers.close()
        self.files.release()
        return report

    @property
    def trained_model_path(self) -> Path:
        """Where `end_training` writes the model: `<output_dir>/<model>_trained.onnx`, or `joined_trained.onnx`."""
        return trained_model_path(self.parameters)
