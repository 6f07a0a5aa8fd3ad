"""What `onward init` does: look, ask, pack, fit the batch into memory, try one step, write RUN.yaml."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from onward.commands.loaders import training_loader
from onward.commands.rehearsal import without_traces
from onward.commands.wizard import ask
from onward.data.manifest import Manifest, read_manifest
from onward.data.packing.class_folders import UnreadableFileError
from onward.data.packing.options import AudioOptions, ImageOptions
from onward.data.packing.packer import pack
from onward.engine.building.preparation import present_feature_specs, read_training_graph
from onward.engine.forecast.batch_size import UNTRIED_SHARE, find_by_forecast, has_fixed_batch, peak_bytes
from onward.environment import Environment
from onward.errors import DataError, ParametersError, StorageError, UserError
from onward.exclusive.lock import writing_to
from onward.exclusive.temporary import replacing
from onward.parallel.memory import memory_of_rank
from onward.parameters import Parameters
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.plan.topology import Topology
from onward.proposal.data_facts import DataFacts
from onward.proposal.data_reading import read_data_facts
from onward.proposal.model_facts import read_model_facts
from onward.proposal.pack_command import pack_command
from onward.proposal.proposal import Answers, Choice, Counts, Packing, Proposal, RecordedAnswers
from onward.proposal.propose import propose
from onward.proposal.summary import summary_lines
from onward.proposal.yaml_text import to_yaml
from onward.report.phase_watcher import PhaseWatcher
from onward.report.phases import Phases
from onward.runner import TrainingRunner


def initialize(options: argparse.Namespace, phases: Phases, limits: Limits = DEFAULT_LIMITS) -> None:
    """Writes a RUN.yaml as the command line asks, of a model and data that may ask for so much of the machine.

    Args:
        options: of the command line.
        phases: announce what takes long.
        limits: of the machine.

    Raises:
        UserError: what cannot train and why, with what to do.
    """
    target = Path(options.output)
    _check_target(target, options.force)
    with writing_to(files=[target]):
        _make_folder(target.parent)
        _check_target(target, options.force)  # again: until now another process could write it
        _initialize(options, target, phases, limits)


def _initialize(options: argparse.Namespace, target: Path, phases: Phases, limits: Limits) -> None:
    folder, answers = target.parent, _answers(options)
    phases.begin(f"reading {options.model}")
    model = read_model_facts(Path(options.model), limits)
    phases.begin(None if options.data is None else f"reading {options.data}")
    data = None if options.data is None else read_data_facts(Path(options.data), limits, options.kind)
    phases.begin(None if options.wizard else "choosing what to propose")
    if options.wizard:
        answers = ask(model, data, answers, folder)
    memory = memory_of_rank(None, Environment().device)
    answers = RecordedAnswers(**vars(answers))
    proposal = propose(model, data, answers, folder=folder, memory_bytes=memory)
    _refuse_unread(answers, data)
    if data is not None:
        counts = _pack(proposal, options.force, limits, phases) if proposal.packing is not None else None
        proposal = propose(model, data, answers, folder=folder, counts=counts, memory_bytes=memory)
        parameters = Parameters.from_mapping(proposal.to_mapping(), base=folder.resolve())
        phases.begin("forecasting how much memory a batch needs")
        parameters, note = _fitted(parameters)
        proposal = _with_batch(proposal, parameters, note)
        tried = "" if options.no_trial else _try_a_step(parameters, phases)
    else:
        Parameters.from_mapping(proposal.to_mapping(), base=folder.resolve())
        tried = ""
    phases.end()
    _write(target, to_yaml(proposal, command_line(options, limits)))
    _report(proposal, target, tried)


def _check_target(target: Path, is_forced: bool) -> None:
    if target.is_dir():
        raise ParametersError(
            f"--output {str(target)!r} is a folder; pass a file, such as {str(target / 'run.yaml')!r}."
        )
    if target.exists() and not is_forced:
        raise ParametersError(
            f"{str(target)!r} already exists. Pass --force to overwrite it, or -o to write another file."
        )


def _make_folder(folder: Path) -> None:
    """The folder of RUN.yaml, from which its paths are seen."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{str(folder)!r} cannot be created: {error.strerror}. Pass another file with -o."
        ) from error


def _answers(options: argparse.Namespace) -> Answers:
    for name in ("epochs", "batch_size", "sequence_length", "sample_rate"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ParametersError(f"--{name.replace('_', '-')} is {value}; expected at least 1.")
    if options.learning_rate is not None and not 0 < options.learning_rate < math.inf:
        raise ParametersError(f"--learning-rate is {options.learning_rate:g}; expected a number above 0.")
    if options.test_fraction is not None and not 0 <= options.test_fraction < 1:
        raise ParametersError(f"--test-fraction is {options.test_fraction:g}; expected a fraction from 0 to below 1.")
    return Answers(
        label=options.label,
        inputs=None if options.inputs is None else tuple(options.inputs.split(",")),
        prediction=options.prediction,
        loss=options.loss,
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        weights=None if options.weights is None else tuple(options.weights.split(",")),
        tokenizer=options.tokenizer,
        sequence_length=options.sequence_length,
        sample_rate=options.sample_rate,
        output_dir=options.output_dir,
        test_fraction=options.test_fraction,
    )


def _refuse_unread(answers: RecordedAnswers, data: DataFacts | None) -> None:
    """Refuses options that change nothing, such as a tokenizer for images."""
    unread = [f"--{name.replace('_', '-')}" for name in answers.unread()]
    if unread:
        what = "there are no data" if data is None else f"the data are of kind {data.kind!r} ({str(data.path)!r})"
        raise ParametersError(
            f"{' and '.join(unread)} would change nothing for this model, since {what}. Leave it out."
        )


def command_line(options: argparse.Namespace, limits: Limits = DEFAULT_LIMITS) -> str:
    """The command that has these options."""
    words = ["onward", "init", options.model, *([options.data] if options.data else [])]
    for name, value in vars(options).items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("model", "data", "command") or value in (None, False) or (name, value) == ("output", "run.yaml"):
            continue
        words += [flag] if value is True else [flag, str(value)]
    words += [f"--limits.{name}={value:.15g}" for name, value in limits.changed().items()]
    return shlex.join(words)


# ------------------------------------------------------------------------------------------------------------ packing


def _pack(proposal: Proposal, is_forced: bool, limits: Limits, phases: Phases) -> Counts:
    """Packs the data, unless they are there already, packed in the same way; returns how many samples there are."""
    packing = proposal.packing
    assert packing is not None
    found = _packed_before(packing)
    if found is not None:
        print(f"{packing.folder} already holds these data, packed with the same options.")
        return found
    if not is_forced and packing.folder.is_dir() and any(packing.folder.rglob("*.pb")):
        raise DataError(
            f"{str(packing.folder)!r} holds shards of other data, or packed with other options. Pass --force to "
            "overwrite them, or -o to write RUN.yaml to another folder."
        )
    command = pack_command(packing.source, packing.folder, packing.options, packing.kind)
    print(f"packing: {command}", flush=True)
    is_terminal = sys.stderr.isatty()
    how = replace(packing.options, overwrite=is_forced, progress=is_terminal, limits=limits)
    try:
        summary = pack(packing.source, packing.folder, how, phases.begin)
    except UnreadableFileError as error:
        raise DataError(f"{error} {_without_unreadable(packing)}") from error
    phases.end()
    print(summary.describe())
    return _counts(list(summary.folders.values()))


def _without_unreadable(packing: Packing) -> str:
    options = packing.options
    assert isinstance(options.source, AudioOptions | ImageOptions)
    skipping = replace(options, source=replace(options.source, unreadable="skip"))
    command = pack_command(packing.source, packing.folder, skipping, packing.kind)
    return f"To start without them: {command}, then onward init MODEL {shlex.quote(str(packing.folder))}."


def _packed_before(packing: Packing) -> Counts | None:
    folders = [packing.folder / part for part in packing.options.splits]
    found = [read_manifest(folder) for folder in folders if folder.is_dir()]
    manifests = [one for one in found if one is not None]
    source = packing.options.source
    assert source is not None
    wanted = packing.options.to_dict(source)
    if len(manifests) != len(folders) or any(one.source != str(packing.source) for one in manifests):
        return None
    if any(_plain(dict(one.options)) != _plain(wanted) for one in manifests):
        return None
    sources = [packing.source, *([Path(packing.options.test_source)] if packing.options.test_source else [])]
    newest = max(map(_newest, sources))
    written = min((folder / "pack.json").stat().st_mtime for folder in folders)
    return _counts(manifests) if newest <= written else None


def _plain(value: object) -> object:
    """With lists for tuples, as JSON reads them."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _newest(source: Path) -> float:
    files = [source] if source.is_file() else [one for one in source.rglob("*") if one.is_file()]
    return max(one.stat().st_mtime for one in files)


def _counts(manifests: list[Manifest]) -> Counts:
    return Counts(manifests[0].sample_count, manifests[1].sample_count if len(manifests) > 1 else 0)


# ------------------------------------------------------------------------------------------------- memory, one step


def _fitted(parameters: Parameters) -> tuple[Parameters, str]:
    """The run in micro-batches that fit this machine's memory, by forecast, and what to say of it."""
    limit = memory_of_rank(parameters.machine.memory_gb, Environment().device)
    graph, specs = read_training_graph(parameters), present_feature_specs(parameters)
    counted = without_traces(parameters, parameters.training.gradient_accumulation_steps)
    needs = peak_bytes(counted, graph, specs)
    if needs <= UNTRIED_SHARE * limit or has_fixed_batch(parameters, graph):
        return parameters, ""
    chosen, _ = find_by_forecast(counted, Topology(), graph, specs, limit)
    training = replace(
        parameters.training,
        batch_size=chosen.training.batch_size,
        gradient_accumulation_steps=chosen.training.gradient_accumulation_steps,
    )
    return replace(parameters, training=training), (
        f"a micro-batch of {parameters.training.batch_size} samples needs {needs / 1e9:.2g} GB by the forecast, and "
        f"{limit / 1e9:.2g} GB are free: gradients are accumulated over smaller micro-batches."
    )


def _with_batch(proposal: Proposal, parameters: Parameters, reason: str) -> Proposal:
    """The proposal with the micro-batches that fit."""
    if not reason:
        return proposal
    choices: list[Choice] = []
    for choice in proposal.choices:
        if choice.field == "training.batch_size":
            choices.append(Choice(choice.field, parameters.training.batch_size, reason))
            count = parameters.training.gradient_accumulation_steps
            choices.append(Choice("training.gradient_accumulation_steps", count))
        else:
            choices.append(choice)
    return replace(proposal, choices=tuple(choices))


def _try_a_step(parameters: Parameters, phases: Phases) -> str:
    """Trains one update and forgets it; returns what to say of the loss.

    Raises:
        DataError: it failed, or the loss is not finite.
    """
    tried = without_traces(parameters, parameters.training.gradient_accumulation_steps)
    runner = TrainingRunner(tried, Environment(), [PhaseWatcher(phases)], progress=False)
    loader = training_loader(tried)
    try:
        runner.initialize(loader.feature_specs())
        summary = runner.run(loader)
    except UserError as error:
        raise DataError(f"the trial step failed: {error} Pass --no-trial to write the file anyway.") from error
    finally:
        loader.close()
    if summary.first_loss is None or not math.isfinite(summary.first_loss):
        raise DataError(
            f"the loss of the trial step is {summary.first_loss}. Look for NaN, infinite or very large values in the "
            "data, or pass --no-trial to write the file anyway."
        )
    return f"trial step: the initial loss is {summary.first_loss:.4g}."


# ------------------------------------------------------------------------------------------------------------- result


def _write(target: Path, text: str) -> None:
    try:
        with replacing(target) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{str(target)!r} cannot be written: {error.strerror}. Name another file with -o."
        ) from error


def _report(proposal: Proposal, target: Path, tried: str) -> None:
    for line in summary_lines(proposal):
        print(line)
    if tried:
        print(tried)
    print(f"wrote {target}. Review it, then run: onward train {shlex.quote(str(target))}")
