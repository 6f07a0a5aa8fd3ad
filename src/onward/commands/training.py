"""What `onward train` does: one run from a RUN.yaml, its rounds, its watchers, and the trained model at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from onward.commands.path_fields import naming_path_fields
from onward.data.loader import DataLoader
from onward.engine.epochs import count_in_steps
from onward.engine.performance import performance_lines, synthetic_loader
from onward.engine.preparation import known_dimensions, label_ranges, present_feature_specs
from onward.environment import Environment, choose_allocator
from onward.errors import ParametersError
from onward.parallel.failure import ending_together
from onward.parallel.launcher import detect
from onward.parallel.launching import check_room, launch_workers, worker_count
from onward.parallel.process import Mesh, start, stop
from onward.parameters import Checkpoint, Parameters
from onward.runner import TrainingRunner


def train(file: str | Path, overrides: Mapping[str, str] | None = None) -> None:
    """Trains as a RUN.yaml says, from its checkpoint where there is one, and writes the trained model.

    Under torchrun, mpirun or srun this process is one of many. Where none of them started it and the sizes of
    `distributed` ask for several processes, it starts them on this machine and waits for them.

    Raises:
        UserError: of any kind, each with what to do.
        Interrupted: a signal came, and the state is saved.
        SystemExit: with the exit code of the processes that were started here.
    """
    choose_allocator()
    if detect().launcher == "none":
        parameters = Parameters.load(file, overrides)
        if worker_count(parameters.distributed) > 1:
            raise SystemExit(_launch(parameters, file, overrides or {}))
    with ending_together("onward train"):
        parameters = Parameters.load(file, overrides)
        with naming_path_fields(parameters):
            _train_here(parameters)


def _launch(parameters: Parameters, file: str | Path, overrides: Mapping[str, str]) -> int:
    """This command once more, in as many processes as the sizes say."""
    environment = Environment(execution_provider=parameters.machine.execution_provider)
    check_room(parameters.distributed, environment.device_kind)
    fields = [f"--{name}={value}" for name, value in overrides.items()]
    return launch_workers(worker_count(parameters.distributed), ["-m", "onward", "train", str(file), *fields])


def _train_here(parameters: Parameters) -> None:
    machine = parameters.machine
    environment = Environment(
        execution_provider=machine.execution_provider,
        threads=machine.threads,
        deterministic=machine.deterministic,
    )
    mesh = start(parameters.distributed, environment.device_kind)
    if parameters.training.is_perf_test:
        _measure(parameters, environment, mesh)
        return
    notes: list[str] = []
    parameters = count_in_steps(parameters, mesh.topology.data_size, notes.append)
    rounds = (parameters, *parameters.next_rounds)
    data = [(_training_loader(one, mesh), _test_loader(one, mesh)) for one in rounds]
    runner = TrainingRunner(parameters, environment, mesh=mesh)
    runner.watchers.on_messages(notes)
    try:
        runner.initialize(data[0][0].feature_specs())
        if runner.round >= len(rounds):
            runner.watchers.on_message("all rounds of this run are trained already; evaluating and writing the model.")
        first = min(runner.round, len(rounds) - 1)
        for number, (training, test) in enumerate(data[first:], first):
            runner.update_parameters(rounds[number], training.feature_specs())
            if number >= runner.round:
                _run_round(runner, training, test)
        runner.end_training(data[-1][1])
    finally:
        for loader in (loader for pair in data for loader in pair if loader is not None):
            loader.close()
        runner.watchers.close()
        runner.files.publish_last(failed=sys.exc_info()[0] is not None)
    stop(mesh)
    runner.watchers.raise_failures()


def _measure(parameters: Parameters, environment: Environment, mesh: Mesh) -> None:
    """One round on synthetic data, of which nothing stays but what it says."""
    parameters = replace(
        parameters,
        paths=replace(parameters.paths, output_dir=None),
        checkpoint=Checkpoint(),
        training=replace(parameters.training, skip_evaluation=True, evaluation_period=0, evaluation_period_epochs=None),
        next_rounds=(),
    )
    runner = TrainingRunner(parameters, environment, mesh=mesh)
    specs = present_feature_specs(parameters)
    try:
        runner.initialize(specs)
        parameters = runner.parameters
        sizes = known_dimensions(parameters.training, runner.graph, specs)
        ranges = label_ranges(parameters.loss, runner.graph)
        summary = runner.run(synthetic_loader(parameters, runner.graph, sizes, ranges))
        device = environment.device
        for line in performance_lines(parameters, runner.graph, sizes, summary, device, mesh.world_size):
            runner.watchers.on_message(line)
    finally:
        runner.watchers.close()
    stop(mesh)


def _run_round(runner: TrainingRunner, training: DataLoader, test: DataLoader | None) -> None:
    try:
        runner.run(training, test)
    finally:
        for text in training.messages:
            runner.watchers.on_message(text)
        if training.dropped_samples:
            runner.watchers.on_message(
                f"{training.dropped_samples} samples at the ends of epochs did not fill a batch and were dropped."
            )
        training.close()


def _training_loader(parameters: Parameters, mesh: Mesh) -> DataLoader:
    folder = parameters.paths.train_data_dir
    if folder is None:
        raise ParametersError("paths.train_data_dir is missing; name the folder of the training shards.")
    part = (mesh.place.data, mesh.topology.data_size)
    return _loader(parameters, folder, *part, shuffle=parameters.data.shuffle_data)


def _test_loader(parameters: Parameters, mesh: Mesh) -> DataLoader | None:
    folder = parameters.paths.test_data_dir
    if folder is None or parameters.training.skip_evaluation:
        return None
    is_shared_out = parameters.data.test_data == "partitioned"
    part = (mesh.place.data, mesh.topology.data_size) if is_shared_out else (0, 1)
    return _loader(parameters, folder, *part, shuffle=False)


def _loader(parameters: Parameters, folder: Path, rank: int, size: int, *, shuffle: bool) -> DataLoader:
    data = parameters.data
    return DataLoader(
        data.input_name_map,
        folder,
        data.max_num_files_preload,
        rank,
        size,
        shuffle=shuffle,
        seed=parameters.training.seed,
        last_batch=data.last_batch,
        skip_corrupt=data.skip_corrupt_files,
    )
