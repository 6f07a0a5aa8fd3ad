"""`Run`: what a run consists of once its model is read and its network is built, complete from the beginning.

What changes while it trains is its `state`, and its parameters from round to round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from onward.checkpoint.agreement import gather_from_all
from onward.checkpoint.run_checkpoints import RunCheckpoints
from onward.checkpoint.run_files import RunFiles
from onward.data.batches import BatchSource, DataCursor
from onward.data.shard import FeatureSpec
from onward.engine.building.assembly import Assembly, assemble
from onward.engine.building.calibration import calibrate
from onward.engine.building.preparation import (
    check_dimensions,
    feature_ranges,
    make_folders,
    plan_run,
    read_training_graph,
    seed_random,
    watched_names,
    write_loss_model,
)
from onward.engine.evaluating.early_stopping import BestEvaluation, best_evaluation
from onward.engine.evaluating.evaluation import Evaluator
from onward.engine.faults.digests import digests_of
from onward.engine.forecast.batch_size import BatchSizes
from onward.engine.functions import MetricFunction
from onward.engine.inputs.epochs import count_in_steps, count_in_steps_of
from onward.engine.inputs.index_ranges import FeatureRange
from onward.engine.loop import closing_batches
from onward.engine.network.precision_choice import agreed_precision, with_precision
from onward.engine.reports import CheckpointReport, EvaluationReport
from onward.engine.state import TrainState
from onward.engine.update_in_backward import refuse_torn
from onward.errors import OtherTensorsError, ParametersError
from onward.graph.adapters.base_checksum import base_checksum
from onward.graph.training_graph import TrainingGraph
from onward.optim.building import unmatched_rules
from onward.optim.schedules import RateAdjustment
from onward.parallel.agreement import check_same
from onward.parallel.launch.process import Mesh
from onward.parameters import Parameters, check
from onward.parameters.changes import notes_on_changes, reason_for_other_tensors
from onward.parameters.checks import fixed_fields_changed
from onward.parameters.effects import fields_without_effect
from onward.report.watching import Watchers
from onward.spelling import shortened


class Run:
    """A run that is ready to train.

    Attributes:
        parameters: of the present round, in steps where epochs were given, with the micro-batch that was found.
        files: where the run's files are stored.
        mesh: all processes, and this one's place among them.
        watchers: who is notified of every event.
        graph: what is trained, unsharded, with its loss.
        feature_ranges: features that are class labels or pick rows -> which there are.
        assembly: what this rank trains.
        evaluator: computes the metrics of evaluations.
        best: compares evaluations; None: nobody asks.
        checkpoints: loads and saves.
        keeps_updates: whether the first round is given in weight updates, and so has as many with any accumulation.
        resumed_update: the update of the checkpoint that was loaded; None: there was none.
        evaluation: the last one of the present round, with its data; (None, None): there was none.
    """

    def __init__(
        self,
        *,
        parameters: Parameters,
        files: RunFiles,
        mesh: Mesh,
        watchers: Watchers,
        graph: TrainingGraph,
        feature_ranges: Mapping[str, FeatureRange],
        assembly: Assembly,
        evaluator: Evaluator,
        best: BestEvaluation | None,
        checkpoints: RunCheckpoints,
        batch_sizes: BatchSizes,
        keeps_updates: bool = False,
    ) -> None:
        self.parameters, self.files, self.mesh, self.watchers = parameters, files, mesh, watchers
        self.graph, self.assembly, self.evaluator, self.best = graph, assembly, evaluator, best
        self.feature_ranges, self.checkpoints, self._batch_sizes = feature_ranges, checkpoints, batch_sizes
        self.evaluation: tuple[BatchSource | None, EvaluationReport | None] = (None, None)
        self._ended_step, self.keeps_updates = 0, keeps_updates
        self.resumed_update = self._resume()

    @property
    def state(self) -> TrainState:
        """All that changes while the run trains."""
        return self.assembly.state

    def _resume(self) -> int | None:
        settings = self.parameters.checkpoint
        rounds = (self.parameters, *self.parameters.next_rounds)
        try:
            notes = self.checkpoints.resume(settings, self.state)
        except OtherTensorsError as error:
            reason = reason_for_other_tensors(rounds, self.checkpoints.record(settings) or {})
            raise (error.because_of(reason) if reason else error) from None
        if notes is None:
            return None
        record, counters = self.checkpoints.record(settings) or {}, self.state.counters
        changes = notes_on_changes(rounds, record, counters.step)
        self.watchers.on_messages([*notes, *changes, *self._batch_sizes.restate(rounds, record, counters)])
        self.watchers.restore(record.get("callbacks", {}))
        # A round is saved with its last step. Asked for more steps than that, it goes on; else it is over.
        if self._batch_sizes.is_over(rounds, counters):
            self.finish_round()
        return counters.update

    def begin_round(self, parameters: Parameters, specs: Mapping[str, FeatureSpec]) -> None:
        """Takes the parameters of the next round.

        Args:
            parameters: of the round.
            specs: what the samples of its data have, for `training.find_batch_size`.

        Raises:
            ParametersError: they are wrong in themselves, or change what is built already.
        """
        parameters = checked_for_round(parameters, self.parameters, self.files)
        number, notify = self.state.counters.round, self.watchers.on_message
        parameters = count_in_steps(parameters, self.mesh.topology.reader_count, notify)
        self.parameters = self._batch_sizes.settle(parameters, number, self.mesh, self.graph, specs, notify)
        _check_names(self.parameters, self.graph)

    def count_steps_of(self, data: BatchSource) -> None:
        """Converts a round that is given in epochs to steps, by the data that it is about to be trained with."""
        self.parameters = count_in_steps_of(self.parameters, data, self.mesh, self.watchers.on_message)

    def calibrate(self, data: BatchSource) -> None:
        """Sets what a run of quantization-aware training finds out from its first batch."""
        if self.parameters.quantize_aware.weights is None or self.state.counters.update:
            return
        with closing_batches(data.batches(self.parameters.training.batch_size, self.state.cursor)) as batches:
            note = calibrate(self.state, self.graph, next(batches))
        self.watchers.on_messages([] if note is None else [note])

    def finish_round(self) -> None:
        """The next round starts with step 0, at the beginning of its data."""
        counters = self.state.counters
        self._ended_step = counters.step
        counters.round += 1
        counters.step = counters.samples = counters.ended_early_of = 0
        self.state.cursor, self.state.rate, self.state.course.first_loss = DataCursor(), RateAdjustment(), None

    def evaluate(self, data: BatchSource) -> EvaluationReport:
        """Means over the entire test set, with the weights as they are now."""
        started, training = time.perf_counter(), self.parameters.training
        with self.watchers.phase("evaluating"):
            metrics, samples = self.evaluator.evaluate(
                self.state, lambda: data.one_pass(training.eval_batch_size or training.batch_size)
            )
        (step, in_round), seconds = self._shown_step(), time.perf_counter() - started
        report = EvaluationReport(
            step=step,
            update=self.state.counters.update,
            round=in_round,
            metrics=metrics,
            samples=samples,
            seconds=seconds,
            stale_updates=self.state.stale_updates,
        )
        self.watchers.on_evaluation(report)
        self.evaluation = (data, report)
        return report

    def evaluate_at_end(self, data: BatchSource) -> EvaluationReport:
        """Evaluates, unless the last evaluation was of these data and these weights."""
        source, report = self.evaluation
        now = self.state.counters.update - self.state.stale_updates
        if report is not None and source is data and report.weights_update == now:
            return report
        return self.evaluate(data)

    def save(self) -> Path:
        """Starts a checkpoint of the present state; training may go on at once."""
        state, started = self.state, time.perf_counter()
        refuse_torn(state)
        best = None if self.best is None else self.best.kept_update
        record, callbacks = self._batch_sizes.record(), self.watchers.states()
        path = self.checkpoints.save(self.parameters, state, record, callbacks, best)
        step, stall = self._shown_step()[0], time.perf_counter() - started
        self.watchers.on_checkpoint(CheckpointReport(step, state.counters.update, self.files.shown(path), stall))
        return path

    def save_in_memory(self) -> None:
        """Starts a checkpoint of the present state in the memory of the hosts."""
        record, callbacks = self._batch_sizes.record(), self.watchers.states()
        self.checkpoints.save_in_memory(self.parameters, self.state, record, callbacks)

    def save_last_of_round(self) -> str | None:
        """The checkpoint in which a round ends, complete on return; None: none are kept."""
        if self.parameters.checkpoint.checkpoints_dir is None:
            return None
        path = self.save()
        self.checkpoints.wait()
        self.checkpoints.clear_memory()
        return self.files.shown(path)

    def _shown_step(self) -> tuple[int, int]:
        """Step and round for a report; after a round has ended, its last step rather than step 0 of the next."""
        counters = self.state.counters
        if counters.step == 0 and counters.round > 0:
            return self._ended_step, counters.round - 1
        return counters.step, counters.round


def checked_for_round(parameters: Parameters, before: Parameters, files: RunFiles) -> Parameters:
    """Parameters of the next round, with paths of this machine.

    Raises:
        ParametersError: they are wrong in themselves, or change what rounds share.
    """
    parameters = with_precision(files.localized(check(parameters)), before.mixed_precision)
    if changed := fixed_fields_changed(before, parameters):
        raise ParametersError(
            f"{', '.join(changed)} cannot change between rounds of one run; start another TrainingRunner."
        )
    return parameters


def build_run(
    parameters: Parameters,
    mesh: Mesh,
    files: RunFiles,
    watchers: Watchers,
    specs: Mapping[str, FeatureSpec],
    metrics: Mapping[str, MetricFunction],
) -> Run:
    """Reads the model, adds the loss, builds network and optimizer, and loads a checkpoint if there is one.

    Args:
        parameters: of the run.
        mesh: all processes, and this one's place among them.
        files: where the run's files are stored.
        watchers: who is notified of every event.
        specs: what the samples of the training data have, where it is known.
        metrics: what evaluations compute besides.

    Raises:
        ModelError: the model cannot be read, lowered or trained as asked.
        CheckpointError: the checkpoint is broken or of another model.
        StorageError: the output directory cannot be made.
    """
    notify = watchers.on_message
    checkpoints = RunCheckpoints(mesh, files, notify)
    record, asked_updates = checkpoints.record(parameters.checkpoint), parameters.training.num_updates
    batch_sizes = BatchSizes.of_record(record)
    parameters, chosen = agreed_precision(parameters, mesh, record)
    watchers.on_messages([] if chosen is None else [chosen])
    seed_random(parameters.training.seed, mesh)
    make_folders(parameters)
    watchers.on_phase("reading the model")
    graph = read_training_graph(parameters)
    write_loss_model(parameters, mesh.rank)
    check_same(mesh, digests_of(parameters, graph))
    watchers.on_messages((*fields_without_effect(parameters, refused=False), *graph.notes))
    parameters = count_in_steps(parameters, mesh.topology.reader_count, notify, record)
    parameters = batch_sizes.settle(parameters, 0, mesh, graph, specs, notify)
    watchers.on_phase("building the network")
    assembly = assemble(parameters, mesh, graph, plan_run(parameters, mesh.topology, graph, specs), notify, specs)
    watchers.on_messages(dict.fromkeys(assembly.notes))
    ranges = feature_ranges(parameters.loss, graph)
    evaluator = Evaluator(parameters, assembly, ranges, metrics)
    best = best_evaluation(parameters, evaluator)
    watchers.add([] if best is None else [best])
    if unmatched := unmatched_rules(parameters.optimizer, graph.weights, graph.known_as):
        notify(f"optimizer_attributes: no trainable weight matches {shortened(list(map(repr, unmatched)), 3)}.")
    _check_names(parameters, graph)
    if parameters.checkpoint.checkpoints_dir or parameters.checkpoint.checkpoint_to_load_path:
        checkpoints.base_checksum = gather_from_all(
            mesh.control, base_checksum(graph.source, graph.adapters) if mesh.rank == 0 else ""
        )[0]
    watchers.on_phase("looking for a checkpoint to load")
    return Run(
        parameters=parameters,
        files=files,
        mesh=mesh,
        watchers=watchers,
        graph=graph,
        feature_ranges=ranges,
        assembly=assembly,
        evaluator=evaluator,
        best=best,
        checkpoints=checkpoints,
        batch_sizes=batch_sizes,
        keeps_updates=asked_updates is not None,
    )


def _check_names(parameters: Parameters, graph: TrainingGraph) -> None:
    """What parameters name of the graph must be in it."""
    watched_names(parameters.tensorboard, graph)
    check_dimensions(parameters.training.mapped_dimensions, graph)
