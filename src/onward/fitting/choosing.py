"""What `fit` chooses where no loss is given: a proposal for the model and the data, as `onward init` makes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.batches import BatchSource
from onward.data.loader import DataLoader
from onward.data.packing.packer import pack
from onward.data.sources.iterated import IteratedDataLoader
from onward.data.sources.opening import ReadingOptions
from onward.data.sources.temporary import TemporaryFolder
from onward.errors import ParametersError
from onward.fitting.request import ModelPorts, Wanted, no_loss
from onward.parameters import Loss
from onward.proposal.data_facts import DataFacts, Feature
from onward.proposal.data_reading import read_data_facts
from onward.proposal.model_facts import read_model_facts
from onward.proposal.proposal import Answers, Counts, Proposal
from onward.proposal.propose import propose

_LOOKED_AT = 4096
"""Samples that are looked at, at most."""

_BY_USER = "set on the command line"
"""How reasons of choices begin that were no choice."""

_SECTIONS = ("training", "learning_rate", "optimizer")
_LEFT_TO_FIT = (
    "evaluation_period_epochs",
    "display_loss_steps",
    "seed",
    "weights_to_train",
    "num_epochs",
    "batch_size",
)


def choose(wanted: Wanted, model: ModelPorts, source: BatchSource, has_validation: bool) -> tuple[Wanted, str]:
    """The arguments with a loss, and what else was left out, chosen for data that are open; and a note.

    Raises:
        ParametersError: the data can be read once only, so that nobody can look at them before.
        UserError: the proposal needs to know more.
    """
    if isinstance(source, IteratedDataLoader) and source.is_one_shot:
        raise no_loss(model, tuple(source.feature_specs()))
    features = _features(source)
    count = getattr(source, "sample_count", None) or len(next(iter(features)).values or ())
    facts = DataFacts(path=Path("data"), kind="packed", features=tuple(features), sample_count=count)
    proposal = propose(
        read_model_facts(model.path, model.limits),
        facts,
        _answers(wanted),
        counts=Counts(count, int(has_validation)),
    )
    return _with_proposal(wanted, proposal), _note(proposal)


def choose_for_path(
    wanted: Wanted, model: ModelPorts, path: Path, folder: TemporaryFolder, reading: ReadingOptions
) -> tuple[Wanted, BatchSource, BatchSource | None, str]:
    """The same for a file or folder that is packed as the proposal says: also training and test data, in `folder`.

    Raises:
        UserError: the proposal needs to know more, or the data cannot be packed.
    """
    proposal = propose(
        read_model_facts(model.path, model.limits),
        read_data_facts(path, model.limits),
        _answers(wanted),
        folder=folder.path,
    )
    if proposal.packing is not None:
        options = replace(proposal.packing.options, limits=model.limits)
        pack(proposal.packing.source, proposal.packing.folder, options)
    wanted = _with_proposal(wanted, proposal)
    sources = []
    for name in ("train_data_dir", "test_data_dir"):
        found = proposal.value(f"paths.{name}")
        shuffle = wanted.shuffle and name == "train_data_dir"
        loader = None
        if found is not None:
            part = (reading.rank, reading.size) if name == "train_data_dir" else (0, 1)
            place = folder.path / found
            loader = DataLoader(dict(wanted.input_name_map), place, 2, *part, shuffle=shuffle, seed=wanted.seed)
        sources.append(loader)
    train, test = sources
    assert train is not None
    return wanted, train, test, _note(proposal)


def _features(source: BatchSource) -> list[Feature]:
    batches = [batch.features for batch in islice(source.one_pass(512), _LOOKED_AT // 512)]
    first = batches[0]
    alike = [one for one in batches if all(one[name].shape[1:] == first[name].shape[1:] for name in first)]
    joined = {name: np.concatenate([one[name] for one in alike]) for name in first}
    return [
        Feature(name=name, dtype=str(array.dtype), shape=tuple(array.shape[1:]), values=array)
        for name, array in joined.items()
    ]


def _answers(wanted: Wanted) -> Answers:
    epochs = wanted.epochs
    return Answers(
        label=wanted.label,
        prediction=wanted.prediction,
        epochs=None if epochs is None else max(1, round(epochs)),
        batch_size=wanted.batch_size,
        learning_rate=wanted.learning_rate,
        weights=tuple(wanted.weights_to_train) or None,
    )


def _with_proposal(wanted: Wanted, proposal: Proposal) -> Wanted:
    """What was given stays; what was left out comes from the proposal."""
    sections = proposal.to_mapping()
    loss: dict[str, Any] = sections.pop("loss")
    fields: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in loss.items()}
    training = sections["training"]
    chosen: dict[str, dict[str, Any]] = {
        name: {key: value for key, value in sections.get(name, {}).items() if key not in _LEFT_TO_FIT}
        for name in _SECTIONS
    }
    if wanted.learning_rate is not None:
        chosen["learning_rate"]["initial_lr"] = wanted.learning_rate
    if wanted.optimizer is not None:
        chosen["optimizer"] = {}
    if wanted.gradient_accumulation_steps != 1:
        chosen["training"].pop("gradient_accumulation_steps", None)
    is_timed = wanted.epochs is not None or wanted.steps is not None
    fixed = sections.get("data", {}).get("fixed_inputs")
    chosen["data"] = {} if fixed is None else {"fixed_inputs": fixed}
    return replace(
        wanted,
        loss=Loss(**fields),
        epochs=wanted.epochs if is_timed else training.get("num_epochs"),
        batch_size=wanted.batch_size or training.get("batch_size"),
        gradient_accumulation_steps=chosen["training"].pop(
            "gradient_accumulation_steps", wanted.gradient_accumulation_steps
        ),
        input_name_map={**sections.get("data", {}).get("input_name_map", {}), **wanted.input_name_map},
        parameters=_merged(chosen, wanted.parameters),
    )


def _merged(
    first: Mapping[str, Mapping[str, Any]], second: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    for section, fields in second.items():
        if not isinstance(fields, Mapping):
            raise ParametersError(f"parameters[{section!r}] is {fields!r}; expected a dictionary of fields.")
    names = dict.fromkeys((*first, *second))
    return {name: {**first.get(name, {}), **second.get(name, {})} for name in names}


def _note(proposal: Proposal) -> str:
    """What was chosen, and why, a line each."""
    lines = [f"loss was left out; chosen: {proposal.task}"]
    for choice in proposal.choices:
        section, _, name = choice.field.partition(".")
        if (
            choice.reason
            and not choice.reason.startswith(_BY_USER)
            and (section in ("loss", *_SECTIONS) and name not in ("evaluation_period_epochs",))
        ):
            lines.append(f"{choice.field}: {choice.value} ({choice.reason.rstrip('.')})")
    return "\n".join([*lines, *proposal.notes])
