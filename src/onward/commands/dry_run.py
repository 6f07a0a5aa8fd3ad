"""`onward train --dry-run`: everything that a run does up to its first update, without writing anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from onward.checkpoint.reading import find_latest
from onward.commands.loaders import test_loader, training_loader
from onward.commands.rehearsal import without_files
from onward.engine.inputs.epochs import count_in_steps
from onward.engine.reports import RunSummary, Watcher
from onward.environment import Environment
from onward.parallel.launch.process import start, stop
from onward.parallel.watch.failure import Membership
from onward.parameters import Checkpoint, Parameters
from onward.parameters.local_sgd import compares_evaluations
from onward.report.formatting import format_duration, format_value
from onward.runner import TrainingRunner


def dry_run(
    parameters: Parameters,
    environment: Environment,
    watchers: Callable[[], Sequence[Watcher]],
    membership: Membership,
) -> None:
    """Reads model and data, builds the run, computes one update and reports what a real run would take and write.

    Raises:
        UserError: whatever the run would have failed for.
    """
    mesh = start(parameters.distributed, environment.device_kind, membership=membership)
    notes: list[str] = []
    parameters = count_in_steps(parameters, mesh.topology.reader_count, notes.append)
    runner = TrainingRunner(
        _of_one_update(parameters), environment, watchers() if mesh.rank == 0 else (), mesh, progress=False
    )
    training, test = training_loader(parameters, mesh), test_loader(parameters, mesh)
    try:
        for note in notes:
            runner.watchers.on_message(note)
        runner.initialize(training.feature_specs())
        summary = runner.run(training, test)
        for line in _lines(parameters, summary, test is not None):
            runner.watchers.on_message(f"dry run: {line}")
    finally:
        for loader in (training, test):
            if loader is not None:
                loader.close()
        runner.watchers.close()
    stop(mesh)


def _of_one_update(parameters: Parameters) -> Parameters:
    """The run, ended after an update, without anything that it writes; it starts from the model, not a checkpoint."""
    accumulation, compared = parameters.training.gradient_accumulation_steps, compares_evaluations(parameters)
    stopping = parameters.early_stopping
    if compared is not None:  # its metric is checked, and that there are test data; they are not evaluated
        stopping = replace(stopping, patience=stopping.patience or 1)
    training = replace(
        parameters.training,
        num_train_steps=accumulation,
        evaluation_period=0 if compared is None else 2 * accumulation,
        find_batch_size=False,
    )
    rate = replace(parameters.learning_rate, warmup_steps=None)
    start = Checkpoint(checkpoint_to_load_path=parameters.checkpoint.checkpoint_to_load_path)
    return replace(
        without_files(parameters), training=training, learning_rate=rate, checkpoint=start, early_stopping=stopping
    )


def _lines(parameters: Parameters, summary: RunSummary, is_tested: bool) -> list[str]:
    """What to report, a sentence each."""
    training, checkpoint, paths = parameters.training, parameters.checkpoint, parameters.paths
    accumulation = training.gradient_accumulation_steps
    loss = "" if summary.last_loss is None else f", loss {format_value(summary.last_loss)}"
    lines = [
        f"one update of {summary.samples} samples took {format_duration(summary.train_seconds)}, including "
        f"compilation and specialization{loss}; the run has {training.steps // accumulation:,} updates."
    ]
    lines.append(
        "the test data fit the model." if is_tested else "there are no test data, so nothing would be evaluated."
    )
    folder = checkpoint.checkpoints_dir
    latest = None if folder is None else find_latest(folder)
    if latest is not None:
        lines.append(f"the run would resume from {latest}.")
    places = {
        "the trained model": paths.output_dir,
        "checkpoints": folder,
        "TensorBoard events and metrics.jsonl": parameters.tensorboard.log_dir,
    }
    written = [f"{what} to {place}" for what, place in places.items() if place is not None]
    lines.append(f"the run would write {', '.join(written)}." if written else "the run would write nothing.")
    return [*lines, "nothing was written."]
