"""What `onward train` does: one run from a RUN.yaml, its rounds, its watchers, and the trained model at the end."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from onward.checkpoint.memory.run_memory import newest_here
from onward.checkpoint.run_files import localize
from onward.commands.loaders import check_numbering_of_rounds, test_loader, training_loader
from onward.commands.path_fields import naming_path_fields
from onward.commands.rehearsal import without_files
from onward.data.loader import DataLoader
from onward.engine.building.preparation import check_experts, feature_ranges, present_feature_specs
from onward.engine.building.sizes import known_dimensions
from onward.engine.faults.out_of_memory import smaller_batches
from onward.engine.forecast.performance import performance_lines, synthetic_loader
from onward.engine.inputs.epochs import count_in_steps
from onward.engine.interruption import SAVE_SIGNAL
from onward.engine.reports import Watcher
from onward.environment import Environment, choose_allocator
from onward.parallel.launch.launching import check_room, launch, worker_count
from onward.parallel.launch.process import Mesh, start, stop
from onward.parallel.launch.restarting import RESTARTED_AFTER, Restarts, launch_until_done
from onward.parallel.rendezvous.launcher import check_elastic, detect
from onward.parallel.rendezvous.listening import listening_note
from onward.parallel.watch.failure import Membership, ending_together
from onward.parameters import Parameters
from onward.plan.elastic import fit_to_ranks
from onward.report.console import ConsoleWatcher
from onward.report.metrics_file import JsonConsole
from onward.report.phase_watcher import PhaseWatcher
from onward.report.phases import Phases
from onward.runner import TrainingRunner

DEFAULT_RESTARTS = 3
"""Without progress in between, where checkpoints are saved."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command `train`.

    Attributes:
        display: what standard output shows: lines for people, lines of JSON, or nothing.
        dry_run: build everything and compute one update, but write nothing.
        log_level: of what is logged to standard error; None: nothing is, but for a quiet run's warnings.
    """

    display: Literal["console", "json", "quiet"] = "console"
    dry_run: bool = False
    log_level: str | None = None


def train(
    file: str | Path,
    overrides: Mapping[str, str] | None = None,
    options: TrainOptions | None = None,
    phases: Phases | None = None,
) -> None:
    """Trains as a RUN.yaml says, from its checkpoint where there is one, and writes the trained model.

    Under torchrun, mpirun or srun this process is one of many. Where none of them started it and the sizes of
    `distributed` ask for several processes, it starts them on this machine and waits for them.

    Args:
        file: RUN.yaml.
        overrides: fields of it.
        options: of the command.
        phases: what is announced until there is something to report.

    Raises:
        UserError: of any kind, each with what to do.
        Interrupted: a signal came, and the state is saved.
        SystemExit: with the exit code of the processes that were started here.
    """
    overrides, options = overrides or {}, options or TrainOptions()
    phases = phases or Phases.silent()
    choose_allocator()
    if SAVE_SIGNAL is not None:
        signal.signal(SAVE_SIGNAL, signal.SIG_IGN)  # before the first and after the last step there is nothing to save
    try:
        if detect().launcher == "none":
            parameters, overrides = _with_layout(file, overrides, phases)
            if worker_count(parameters.distributed) > 1 or (is_supervised(parameters) and not options.dry_run):
                phases.end()
                raise SystemExit(_launch(parameters, file, overrides, options))
        with ending_together("onward train") as membership:
            _log_to_stderr(options)
            parameters, overrides = _with_layout(file, overrides, phases)
            parameters, notes = _with_ranks(parameters)
            with naming_path_fields(parameters):
                if options.dry_run:
                    from onward.commands.dry_run import dry_run

                    environment = environment_of(parameters, options)
                    dry_run(parameters, environment, lambda: _watchers(options, phases), membership)
                else:
                    _train_here(parameters, Path(file), options, phases, membership, notes)
    finally:
        phases.end()


def _with_layout(
    file: str | Path, overrides: Mapping[str, str], phases: Phases
) -> tuple[Parameters, Mapping[str, str]]:
    """The parameters of a run, with a layout where one is to be chosen, and the overrides that give the same."""
    parameters = Parameters.load(file, overrides)
    if parameters.distributed.layout != "auto":
        return parameters, overrides
    from onward.commands.layout_search import chosen_overrides  # and with it the search, which few runs need

    overrides, note = chosen_overrides(parameters, overrides, detect(), phases)
    phases.end()
    phases.notify(note)
    return Parameters.load(file, overrides), overrides


def _with_ranks(parameters: Parameters) -> tuple[Parameters, list[str]]:
    """The parameters of a run as the processes that a launcher started train it, and notes."""
    launch = detect()
    if parameters.distributed.elastic and launch.launcher != "none":
        check_elastic(launch)
        return fit_to_ranks(parameters, launch.world_size)
    return parameters, []


def _launch(parameters: Parameters, file: str | Path, overrides: Mapping[str, str], options: TrainOptions) -> int:
    """This command again, in as many processes as the sizes say."""
    environment = environment_of(parameters, options)
    check_room(parameters.distributed, environment.device_kind)
    check_experts(parameters)
    arguments = [] if options.display == "console" else [f"--{options.display}"]
    arguments += ["--dry-run"] if options.dry_run else []
    arguments += [] if options.log_level is None else ["--log-level", options.log_level]
    arguments += [f"--{name}={value}" for name, value in overrides.items()]
    command = ["-m", "onward", "train", str(file), *arguments]
    count = worker_count(parameters.distributed)
    return launch_until_done(lambda more: launch(count, command, more), _restarts(parameters, options))


def _restarts(parameters: Parameters, options: TrainOptions) -> Restarts:
    """When the workers are started again."""
    checkpoint = localize(parameters)[0].checkpoint
    asked, halves = parameters.distributed.max_restarts, parameters.training.halve_batch_on_out_of_memory
    most = asked if asked is not None else DEFAULT_RESTARTS if checkpoint.checkpoints_dir or halves else 0

    def newest_checkpoint() -> str | None:
        path = newest_here(checkpoint)
        return None if path is None else path.name

    smaller = functools.partial(smaller_batches, parameters) if halves else None
    return Restarts(
        most=0 if options.dry_run or parameters.training.is_perf_test else most,
        newest_checkpoint=newest_checkpoint,
        smaller_batches=smaller,
    )


def is_supervised(parameters: Parameters) -> bool:
    """Whether one process alone is started by another one, which restarts it."""
    return bool(parameters.distributed.max_restarts) or (
        parameters.training.halve_batch_on_out_of_memory and parameters.distributed.max_restarts is None
    )


def environment_of(parameters: Parameters, options: TrainOptions) -> Environment:
    """The machine, as section `machine` and the command line say."""
    level = options.log_level
    return Environment.of(
        parameters.machine, logging.WARNING if level is None else logging.getLevelNamesMapping()[level.upper()]
    )


def _log_to_stderr(options: TrainOptions) -> None:
    """Lets the logger "onward" write where it is asked to; warnings of a quiet run and about storage in any case.

    A storage operation that is retried or stalls has no other way to the user: it may be in any thread of any rank.
    """
    is_asked = options.log_level is not None or options.display == "quiet"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("onward" if is_asked else "onward.storage").addHandler(handler)


def _watchers(options: TrainOptions, phases: Phases) -> list[Watcher]:
    """Who shows the run on this rank's standard output."""
    if options.display == "quiet":
        return []
    if options.display == "json":
        return [JsonConsole()]
    console = ConsoleWatcher()
    phases.notify = console.on_message
    return [console, PhaseWatcher(phases)]


def _train_here(
    parameters: Parameters,
    file: Path,
    options: TrainOptions,
    phases: Phases,
    membership: Membership,
    notes: Sequence[str],
) -> None:
    environment = environment_of(parameters, options)
    folder = localize(parameters)[0].paths.output_dir
    mesh = start(parameters.distributed, environment.device_kind, folder, membership)
    shown = _watchers(options, phases) if mesh.rank == 0 else []
    if parameters.training.is_perf_test:
        _measure(parameters, environment, mesh, shown)
        return
    ports = listening_note(detect())
    cause = os.environ.get(RESTARTED_AFTER)
    notes = [*notes, *([] if ports is None else [ports]), *([] if cause is None else [f"restarted: {cause}"])]
    parameters = count_in_steps(parameters, mesh.topology.reader_count, notes.append)
    rounds = (parameters, *parameters.next_rounds)
    data = [(training_loader(one, mesh), test_loader(one, mesh)) for one in rounds]
    check_numbering_of_rounds(data)
    runner = TrainingRunner(parameters, environment, shown, mesh, progress=False, run_file=file)
    runner.watchers.on_messages(notes)
    try:
        runner.initialize(data[0][0].feature_specs())
        if runner.round >= len(rounds):
            runner.watchers.on_message("all rounds of this run are already trained; evaluating and writing the model.")
        first = min(runner.round, len(rounds) - 1)
        for number, (training, test) in enumerate(data[first:], first):
            runner.update_parameters(rounds[number], training.feature_specs())
            if number >= runner.round:
                _run_round(runner, training, test, is_last=number == len(rounds) - 1)
        runner.end_training(data[-1][1])
    finally:
        for loader in (loader for pair in data for loader in pair if loader is not None):
            loader.close()
        runner.watchers.close()
        runner.files.publish_last(failed=sys.exc_info()[0] is not None)
    stop(mesh)
    runner.watchers.raise_failures()


def _measure(parameters: Parameters, environment: Environment, mesh: Mesh, shown: Sequence[Watcher]) -> None:
    """One round on synthetic data, of which nothing stays but what it says."""
    training = replace(parameters.training, skip_evaluation=True, evaluation_period=0, evaluation_period_epochs=None)
    parameters = replace(without_files(parameters), training=training, profiler=parameters.profiler)
    runner = TrainingRunner(parameters, environment, shown, mesh, progress=False)
    specs = present_feature_specs(parameters)
    try:
        runner.initialize(specs)
        parameters = runner.parameters
        sizes = known_dimensions(parameters.training, runner.graph, specs)
        ranges = feature_ranges(parameters.loss, runner.graph)
        summary = runner.run(synthetic_loader(parameters, runner.graph, sizes, ranges))
        device = environment.device
        for line in performance_lines(parameters, runner.graph, sizes, summary, device, mesh.world_size):
            runner.watchers.on_message(line)
    finally:
        runner.watchers.close()
    stop(mesh)


def _run_round(runner: TrainingRunner, training: DataLoader, test: DataLoader | None, *, is_last: bool) -> None:
    try:
        runner.run(training, test, evaluates_at_end=is_last)
    finally:
        for text in training.messages:
            runner.watchers.on_message(text)
        if training.dropped_samples:
            runner.watchers.on_message(
                f"{training.dropped_samples} samples at the ends of epochs did not fill a batch and were dropped."
            )
        training.close()
