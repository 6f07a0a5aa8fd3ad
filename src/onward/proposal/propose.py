"""From a model file, and data, to a `Proposal`: every choice in the order of RUN.yaml."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from onward.data.packing.options import PackOptions, TextOptions
from onward.data.packing.source import make_split_chooser
from onward.errors import DataError
from onward.graph.repair.fixed_inputs import by_pattern
from onward.parameters.limits import DEFAULT_LIMITS
from onward.proposal.any_batch_size import with_batch_proof
from onward.proposal.data_facts import DataFacts
from onward.proposal.data_reading import read_data_facts, text_options_length
from onward.proposal.match_audio import match_audio
from onward.proposal.match_features import match_features
from onward.proposal.match_images import match_images
from onward.proposal.match_tables import match_table
from onward.proposal.match_text import match_text
from onward.proposal.matching import Match
from onward.proposal.model_facts import ModelFacts, read_model_facts
from onward.proposal.proposal import Answers, Choice, Counts, Proposal
from onward.proposal.schedule import accumulation, batch_size, optimizer_choices, training_choices, updates_an_epoch
from onward.proposal.without_data import match_nothing, needed_data

DATA_FOLDER = "data"

SHARDS = 8
"""Of training samples, where there are few of them: as many processes as most machines have GPUs can read them."""

BYTES_OF_PARAMETER = 16
"""Weight, gradient and the two moments of AdamW, in fp32."""

RANK = 8
"""Of adapters."""

PATIENCE = 5
"""Evaluations without improvement before a run ends."""

_MATCHERS: Mapping[str, Callable[[ModelFacts, DataFacts, Answers, Path], Match]] = {
    "packed": match_features,
    "arrays": match_features,
    "table": match_table,
    "images": match_images,
    "audio": match_audio,
    "text": match_text,
}
"""Kind of data -> how they are matched with a model."""


def propose(
    model: Path | ModelFacts,
    data: Path | DataFacts | None = None,
    answers: Answers | None = None,
    *,
    folder: Path | None = None,
    counts: Counts | None = None,
    memory_bytes: float = math.inf,
) -> Proposal:
    """Looks at a model and data and chooses a run; writes nothing.

    Args:
        model: what was read of an .onnx file; or the file, read within the default limits.
        data: a file or folder, or what was read of it; None: there are none yet.
        answers: what the user said beforehand.
        folder: where RUN.yaml will be, and the packed data below it; None: the working folder.
        counts: samples, where they are known; None: as far as they can be seen.
        memory_bytes: for the tensors of the run.

    Raises:
        UserError: what cannot train and why, with what to do.
    """
    answers, folder = answers or Answers(), folder or Path()
    facts = read_model_facts(model, DEFAULT_LIMITS) if isinstance(model, Path) else model
    seen = read_data_facts(data, DEFAULT_LIMITS) if isinstance(data, Path) else data
    facts = with_data(facts, seen)
    if seen is None:
        match = match_nothing(facts, answers)
        counts = counts or Counts(0, 1)
    else:
        match = _MATCHERS[seen.kind](facts, seen, answers, folder / DATA_FOLDER)
        match = _with_shards(_with_split(match, seen, answers), seen)
        counts = counts or _expected_counts(match, seen)
    size = batch_size(facts, match.task, counts, answers)
    several = accumulation(facts, match.task, counts, answers)
    of_update = int(size.value) * (several[0].value if several else 1)
    weights = _weights(facts, answers, memory_bytes)
    is_adapted = any(choice.field == "adapter.rank" for choice in weights)
    training, rate = training_choices(facts, match.task, counts, answers, of_update, is_adapted)
    choices = [
        *_paths(facts, seen, match, counts, answers, folder),
        *_data(facts, match),
        *_loss(match),
        size,
        *several,
        *training,
        Choice("training.seed", 0),
        *weights,
        *rate,
        *optimizer_choices(facts, is_adapted),
        *_record(counts, of_update, _output(answers, folder)),
        *(
            Choice(f"limits.{name}", value, "set on the command line.")
            for name, value in facts.limits.changed().items()
        ),
    ]
    return Proposal(
        model=facts.path,
        data=None if seen is None else seen.path,
        task=match.task.text,
        choices=tuple(choices),
        packing=match.packing,
        questions=match.questions,
        notes=(*match.task.notes, *match.notes, *_notes(facts, int(size.value)), *_notes_on_data(facts, seen)),
        needed_data=needed_data(facts, match) if seen is None else {},
    )


def _notes_on_data(model: ModelFacts, data: DataFacts | None) -> list[str]:
    """Files that are not read, and numbers that are none, which make every update that sees them be skipped."""
    notes: list[str] = []
    if data is not None and data.ignored:
        notes.append(f"files of {str(data.path)!r} that are not read: {data.ignored}.")
    if data is None or "Imputer" in model.operators:
        return notes
    for one in data.features:
        if one.values is None or one.values.dtype.kind != "f" or not len(one.values):
            continue
        count = int((~np.isfinite(one.values)).reshape(len(one.values), -1).any(axis=1).sum())
        if count:
            seen = "samples" if len(one.values) == data.sample_count else "samples looked at"
            notes.append(
                f"feature {one.name!r} holds NaN or infinite numbers in {count:,} of {len(one.values):,} {seen}; every "
                "update with such a sample is skipped. Fix or leave out these samples."
            )
    return notes


def relative(path: Path, folder: Path) -> str:
    """A path as a RUN.yaml in `folder` names it."""
    return os.path.relpath(path, folder)


def _with_split(match: Match, data: DataFacts, answers: Answers) -> Match:
    """A test split for data that are packed here."""
    if match.packing is None:
        return match
    if data.test is not None:
        return _with_test_data(match, data, data.test, answers)
    if data.kind == "text":
        share, seed = 0.1, 0
    else:
        share, seed = _split(data.sample_count)
    if answers.test_fraction is not None:
        share = answers.test_fraction
    options = replace(match.packing.options, test_fraction=share, seed=seed)
    reasons = match.packing.reasons
    if share:
        reasons = (*reasons, f"{share:.0%} of the samples are held out for testing")
    else:
        reasons = (*reasons, f"{data.sample_count} samples are too few to hold some out for testing")
    return replace(match, packing=replace(match.packing, options=options, reasons=reasons))


def _with_shards(match: Match, data: DataFacts) -> Match:
    """Several shards also of few samples: each data-parallel process reads its own ones."""
    if match.packing is None:
        return match
    match = replace(match, packing=replace(match.packing, kind=data.asked_kind))
    assert match.packing is not None
    options = match.packing.options
    count = min(options.samples_per_file, max(1, math.ceil(_expected_counts(match, data).train / SHARDS)))
    if count == options.samples_per_file:
        return match
    reasons = (*match.packing.reasons, f"about {SHARDS} shards, so that as many processes can train on them")
    packing = replace(match.packing, options=replace(options, samples_per_file=count), reasons=reasons)
    return replace(match, packing=packing)


def _with_test_data(match: Match, data: DataFacts, test: DataFacts, answers: Answers) -> Match:
    """The test part that the data are divided into already."""
    assert match.packing is not None
    if answers.test_fraction is not None:
        raise DataError(
            f"--test-fraction is {answers.test_fraction:g}, but {str(data.path.parent)!r} has test data, "
            f"{test.path.name!r}. Leave it out, or pass {str(data.path)!r} alone."
        )
    options = replace(match.packing.options, test_source=str(test.path))
    said = f"{test.path.name} is evaluated during training"
    if data.unused:
        said += f"; {', '.join(one.name for one in data.unused)} is left for a final evaluation"
    packing = replace(match.packing, options=options, reasons=(*match.packing.reasons, said))
    return replace(match, packing=packing)


def _split(count: int) -> tuple[float, int]:
    """The share of test samples, and a seed with which both parts get some."""
    if count < 10:
        return 0.0, 0
    share = 0.2 if count < 2000 else 0.1 if count < 50_000 else 0.02
    if count >= 1000:
        return share, 0
    for seed in range(100):
        choose = make_split_chooser(share, seed)
        test = sum(choose(number) == "test" for number in range(count))
        if 0.7 * share * count <= test <= 1.4 * share * count and test:
            return share, seed
    return share, 0


def _expected_counts(match: Match, data: DataFacts) -> Counts:
    if match.packing is None:
        return Counts(data.sample_count, data.test_count)
    options = match.packing.options
    if data.test is not None:
        return Counts(_count(data, options), _count(data.test, options), False)
    count = _count(data, options)
    test = round(count * options.test_fraction)
    return Counts(count - test, test, False)


def _count(data: DataFacts, options: PackOptions) -> int:
    """Samples that packing gives, as far as it is known before."""
    return text_options_length(data, options.source) if isinstance(options.source, TextOptions) else data.sample_count


def _paths(
    facts: ModelFacts, data: DataFacts | None, match: Match, counts: Counts, answers: Answers, folder: Path
) -> list[Choice]:
    train, test = _folders(data, match, folder)
    choices = [Choice("paths.model_path", relative(facts.path, folder)), Choice("paths.train_data_dir", train)]
    if test is not None and counts.test:
        choices.append(Choice("paths.test_data_dir", test))
    said = f"the trained model is written here as {facts.path.stem}_trained.onnx."
    choices.append(Choice("paths.output_dir", _output(answers, folder), said))
    return choices


def _folders(data: DataFacts | None, match: Match, folder: Path) -> tuple[str, str | None]:
    if match.packing is not None:
        name = relative(match.packing.folder, folder)
        return (f"{name}/train", f"{name}/test") if len(match.packing.options.splits) == 2 else (name, None)
    if data is None or data.train_dir is None:
        return f"{DATA_FOLDER}/train", f"{DATA_FOLDER}/test"
    test = None if data.test_dir is None else relative(data.test_dir, folder)
    return relative(data.train_dir, folder), test


def with_data(facts: ModelFacts, data: DataFacts | None) -> ModelFacts:
    """The model with those inputs fixed that no feature of the data is named after, and whether its batch is."""
    held = set() if data is None else {feature.name for feature in data.features}
    fixed = {name: one for name, one in facts.fixed_inputs.items() if name not in held}
    return with_batch_proof(replace(facts, fixed_inputs=fixed))


def _data(facts: ModelFacts, match: Match) -> list[Choice]:
    choices = []
    if facts.fixed_inputs:
        said = (
            "these inputs are the same for every sample, such as a sampling rate or an initial state of zeros; a cache "
            "of keys and values is empty."
        )
        fixed = by_pattern(facts.fixed_inputs, [port.name for port in facts.inputs])
        choices.append(Choice("data.fixed_inputs", fixed, said))
    if match.name_map:
        choices.append(
            Choice("data.input_name_map", dict(match.name_map), "feature in the data -> input of the model, or label.")
        )
    choices.append(Choice("data.shuffle_data", True, "the order of the samples changes every epoch."))
    return choices


def _loss(match: Match) -> list[Choice]:
    head, rest = list(match.task.loss[:2]), list(match.task.loss[2:])
    if match.label is not None:
        head.append(Choice("loss.label", match.label))
    return head + rest


def _weights(facts: ModelFacts, answers: Answers, memory_bytes: float) -> list[Choice]:
    """Which weights are trained, or that adapters are."""
    if answers.weights:
        return [Choice("training.weights_to_train", list(answers.weights), "set on the command line or in the wizard.")]
    integers = [math.prod(sizes) for name, sizes in facts.adapted.items() if name not in facts.weights]
    needed = BYTES_OF_PARAMETER * facts.element_count
    if sum(integers) > facts.element_count:
        why = (
            f"weights of layers are stored as integers ({len(integers)} of them), which get no gradient: "
            "adapters are trained next to them, and merged into them at the end."
        )
    elif facts.adapted and needed > memory_bytes / 2:
        why = (
            f"training all {facts.element_count / 1e6:,.4g} M parameters takes {needed / 1e9:,.2g} GB for weights, "
            f"gradients and moments, more than half of the {memory_bytes / 1e9:,.2g} GB that are free; adapters "
            "train a small share of them."
        )
    else:
        return []
    return [Choice("adapter.rank", RANK, why), Choice("adapter.alpha", 2 * RANK)]


def _output(answers: Answers, folder: Path) -> str:
    """The folder of all that the run writes, as the RUN.yaml names it; asked for relative to the working folder."""
    return "trained" if answers.output_dir is None else relative(Path(answers.output_dir), folder)


def _record(counts: Counts, size: int, output: str) -> list[Choice]:
    return [
        Choice(
            "checkpoint.checkpoints_dir",
            f"{output}/checkpoints",
            "an interrupted run resumes from here; delete the folder to start from the beginning.",
        ),
        Choice("checkpoint.checkpoint_period", updates_an_epoch(counts, size), "in weight updates; here one epoch."),
        *(_best() if counts.test else ()),
        Choice("tensorboard.log_dir", f"{output}/logs", f"view with onward report {output}, or with TensorBoard."),
    ]


def _best() -> tuple[Choice, ...]:
    return (
        Choice("checkpoint.keep_best", True),
        Choice("checkpoint.export", "best", "the trained model has the weights of the best evaluation."),
        Choice(
            "early_stopping.patience",
            PATIENCE,
            f"the run stops after {PATIENCE} evaluations in a row without a lower test loss.",
        ),
    )


def _notes(facts: ModelFacts, size: int) -> tuple[str, ...]:
    notes = []
    if facts.has_batch_normalization and size < 8 and not facts.origin.is_trained:
        notes.append(
            f"batch normalization in training takes mean and deviation from batches of {size} samples, which are noisy."
        )
    frozen = [name for name, why in facts.frozen.items() if "running statistic" not in why and "rank-0" not in why]
    if frozen:
        notes.append(
            f"{len(frozen)} stored float tensors are not trainable weights, such as {frozen[0]!r} "
            f"({facts.frozen[frozen[0]]}); onward inspect lists them."
        )
    return tuple(notes)
