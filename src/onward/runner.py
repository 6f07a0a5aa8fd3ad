"""`TrainingRunner`: the entire story of a run, read from top to bottom.

Read the model and add the loss, build the network and its optimizer, load a checkpoint; train, evaluate, save;
write the trained model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.artifacts.adapter_outputs import written_paths
from onward.artifacts.trained_model import export_run, rehearse_export_of_run, trained_model_path, write_graphs_if_asked
from onward.checkpoint.run_files import localize
from onward.data.batches import BatchSource
from onward.data.shard import FeatureSpec
from onward.engine.building.preparation import make_loss_scale
from onward.engine.callbacks import check_watchers
from onward.engine.evaluating.early_stopping import BestEvaluation
from onward.engine.faults.loss_spikes import RollBack
from onward.engine.faults.skipped_updates import refuse_untrained_run
from onward.engine.functions import MetricFunction
from onward.engine.inputs.run_data import RunData
from onward.engine.reports import EvaluationReport, RunSummary, Watcher
from onward.engine.state import TrainState
from onward.engine.update_in_backward import refuse_torn
from onward.environment import Environment
from onward.errors import DataError, OnwardError
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import OnnxModule
from onward.parallel.launch.process import Mesh, start
from onward.parameters import Parameters, check
from onward.report.requeue import interrupted
from onward.report.run_watchers import RunWatchers
from onward.report.watching import Watchers
from onward.run import Run, build_run, checked_for_round
from onward.training_round import ANOTHER, TrainingRound


class TrainingRunner:
    """Trains an ONNX model as `Parameters` say: `initialize`, `run` (once or for several rounds), `end_training`.

    Args:
        parameters: what is asked for; checked in full here, before any work.
        environment: the machine.
        watchers: who is notified of every event; more can be added to `watchers` later.
        mesh: the processes, where they have found each other already; else `initialize` finds them.
        progress: show progress on the console, or in the notebook.
        most_log_lines: training lines of a round without a terminal at most, besides its first and last; None: one for
            every displayed update.
        metrics: what evaluations compute in addition, as functions of (outputs, batch).
        returns_on_interrupt: of one process, on Ctrl-C `run` saves and returns as if a callback had stopped it.
        run_file: from which the parameters were read, for the record of the run.

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
        most_log_lines: int | None = None,
        metrics: Mapping[str, MetricFunction] | None = None,
        returns_on_interrupt: bool = False,
        run_file: Path | None = None,
    ) -> None:
        self._asked, self.files = localize(check(parameters))
        self.environment = Environment() if environment is None else environment
        check_watchers(watchers)
        self.watchers = Watchers(watchers)
        self._own_watchers = RunWatchers(self.watchers, self._asked, most_log_lines)
        self._shows_progress, self._metrics, self._run_file = progress, dict(metrics or {}), run_file
        self._given_mesh, self._returns_on_interrupt = mesh, returns_on_interrupt
        if mesh is not None:
            self._own_watchers.begin(mesh.rank, progress)
        self._data = RunData(self.watchers.on_message)
        self._run: Run | None = None

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
        with self._own_watchers.reporting_failure():
            self.environment.apply()
            mesh, parameters = self._given_mesh, self._asked
            if mesh is None:
                mesh = start(parameters.distributed, self.environment.device_kind, parameters.paths.output_dir)
            self._own_watchers.begin(mesh.rank, self._shows_progress)
            run = build_run(parameters, mesh, self.files, self.watchers, feature_specs or {}, self._metrics)
            parameters = run.parameters
            self.watchers.on_phase("rehearsing the export of the trained model")
            rehearse_export_of_run(parameters, run.state, run.graph)
            self._own_watchers.open_files(parameters, self.environment, mesh, self._run_file, run.resumed_update)
            write_graphs_if_asked(parameters, run.state, run.graph, self.watchers.on_message)
            self.watchers.on_phase(None)
            self._run = run

    def _initialized(self) -> Run:
        if self._run is None:
            raise OnwardError("TrainingRunner is not initialized; call initialize() first.")
        return self._run

    @property
    def parameters(self) -> Parameters:
        """Of the present round, checked, with everything that `initialize` found out for them."""
        return self._asked if self._run is None else self._run.parameters

    @property
    def state(self) -> TrainState:
        """All that changes while the run trains."""
        return self._initialized().state

    @property
    def mesh(self) -> Mesh:
        """All processes of the run, and this one's place among them."""
        return self._given_mesh or self._initialized().mesh

    @property
    def graph(self) -> TrainingGraph:
        """What is trained, unsharded, with its loss."""
        return self._initialized().graph

    @property
    def net(self) -> OnnxModule:
        """The network as this process holds it; in a world of one, its `weights` are the fp32 masters."""
        return self.state.networks[0].net

    @property
    def best(self) -> BestEvaluation | None:
        """What compares the evaluations of a round; None: parameters do not ask for it."""
        return self._initialized().best

    @property
    def round(self) -> int:
        """Rounds finished so far; after a resume, the round to continue with."""
        return self.state.counters.round

    @property
    def resumed_update(self) -> int | None:
        """The update of the checkpoint that was loaded; None: there was none."""
        return None if self._run is None else self._run.resumed_update

    def update_parameters(self, parameters: Parameters, feature_specs: Mapping[str, FeatureSpec] | None = None) -> None:
        """Takes other parameters for the next round: data, batch sizes, steps, learning rate, reports, checkpoints.

        Args:
            parameters: of the next round.
            feature_specs: of its training data, for `training.find_batch_size`.

        Raises:
            ParametersError: they are wrong in themselves, or change what is built already: model, loss, weights to
                train, optimizer or precision.
        """
        if self._run is None:
            self._asked = checked_for_round(parameters, self._asked, self.files)
        else:
            self._run.begin_round(parameters, feature_specs or {})

    def reset_loss_scale(self) -> None:
        """Puts the loss scale back to where a run begins, as between two phases of pre-training."""
        self.state.loss_scale = make_loss_scale(self.parameters)

    def run(
        self,
        training_data_loader: Any,
        test_data_loader: Any = None,
        mapped_dimensions: Mapping[str, int] | None = None,
        *,
        evaluates_at_end: bool = False,
    ) -> RunSummary:
        """Trains one round: `num_train_steps` steps, or what is left of them after a resume.

        Args:
            training_data_loader: where training batches come from: an `onward.DataLoader`, or data of any kind that
                `onward.fit` takes.
            test_data_loader: evaluated every `evaluation_period` steps; None: nothing is evaluated.
            mapped_dimensions: symbolic dimension -> size, checked against the data; shapes are otherwise taken
                from the batches.
            evaluates_at_end: evaluate after the last step, before the summary, also where `evaluation_period` is 0;
                `end_training` with the same loader then does not evaluate again.

        Raises:
            Interrupted: a signal came; the state is saved.
            DataError: the data are broken or do not fit.
            StorageError: a checkpoint cannot be written.
        """
        if training_data_loader is None:
            raise DataError("run() needs a training data loader; to evaluate alone, call end_training(test_loader).")
        with self._own_watchers.reporting_failure():
            data, run = self._open(training_data_loader), self._initialized()
            test_data = None if test_data_loader is None else self._open(test_data_loader, is_test=True)
            returns = self._returns_on_interrupt and run.mesh.world_size == 1
            run.count_steps_of(data)
            run.calibrate(data)
            while True:
                try:
                    dimensions = mapped_dimensions or {}
                    return TrainingRound(run, test_data, dimensions, returns, evaluates_at_end).train(data)
                except RollBack as spike:
                    settings = run.parameters.checkpoint
                    path = run.checkpoints.roll_back(settings, run.state, spike, self.watchers.restore)
                    self.watchers.on_roll_back(spike.to(self.files.shown(path), run.state.counters.update))
                    if spike.is_interrupted:
                        raise interrupted(ANOTHER, "at a spike of the loss", self.files.shown(path)) from None

    def _open(self, data: Any, is_test: bool = False) -> BatchSource:
        """The source of batches over data of any kind; the same for the same data."""
        return self._data.open(data, is_test, self.parameters, self.mesh, self.graph)

    def evaluate(self, test_data_loader: Any) -> EvaluationReport:
        """Means over the entire test set, with the weights as they are now; data of any kind that `run` takes."""
        return self._initialized().evaluate(self._open(test_data_loader, is_test=True))

    def save_checkpoint(self) -> Path:
        """Starts a checkpoint of the present state; training may continue at once."""
        return self._initialized().save()

    def wait_for_checkpoint(self) -> None:
        """Waits until the checkpoint that was started last is complete.

        Raises:
            StorageError: it could not be written.
        """
        self._initialized().checkpoints.wait()

    def end_training(self, test_data_loader: Any = None, *, weights: str | None = None) -> EvaluationReport | None:
        """Evaluates again, if there is a test loader, and writes the trained model to `output_dir`.

        Args:
            test_data_loader: data of any kind that `run` takes.
            weights: which weights the network holds, where they are not simply the last, for the record of the run.
        """
        run, report = self._initialized(), None
        with self._own_watchers.reporting_failure():
            refuse_torn(run.state)
            if test_data_loader is not None and not self.parameters.training.skip_evaluation:
                report = run.evaluate_at_end(self._open(test_data_loader, is_test=True))
            run.checkpoints.close()
            refuse_untrained_run(run.state)
            if self.parameters.paths.output_dir is not None:
                path = self.trained_model_path
                what = export_run(self.parameters, run.state, run.graph, path, run.best, report, weights)
                self.files.publish()
                places = written_paths(self.parameters.adapter, path)
                self._own_watchers.on_trained_model(what, [self.files.shown(place) for place in places])
        self._data.close()
        self._own_watchers.close()
        self.files.release()
        return report

    @property
    def trained_model_path(self) -> Path:
        """Where `end_training` writes the model: `<output_dir>/<model>_trained.onnx`, or `joined_trained.onnx`."""
        return trained_model_path(self.parameters)
