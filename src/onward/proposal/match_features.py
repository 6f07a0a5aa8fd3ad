"""Arrays and packed shards against a model: features to inputs, what is left over to the label."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from onward.data.packing.options import ArrayOptions, PackOptions
from onward.data.packing.transforms import IGNORED_LABEL
from onward.errors import DataError
from onward.losses.registry import LOSSES
from onward.proposal.data_facts import DataFacts, Feature
from onward.proposal.label import Label
from onward.proposal.label_order import order_of_labels
from onward.proposal.matching import (
    FeatureAssignment,
    Match,
    assign,
    choose_label,
    free_label_name,
    missing_inputs,
    needed_inputs,
    synthesized,
)
from onward.proposal.model_facts import ModelFacts, Port
from onward.proposal.proposal import Answers, Choice, Packing
from onward.proposal.task import Task, candidates, find_task, loss_of_output, own_loss

_OF_PAIRS = "every sample is a pair of answers, a chosen and a rejected one."
_TEXT_NEEDS = "Pass text, or add a feature of labels with the same shape."


def match_features(model: ModelFacts, data: DataFacts, answers: Answers, folder: Path) -> Match:
    """How arrays, or shards that are packed already, go with a model.

    Raises:
        DataError: an input has no feature, no label is there, or none fits; with what to do.
    """
    of_pairs, is_asked = data.are_pairs, answers.loss is not None
    if of_pairs:
        kind = next(kind.name for kind in LOSSES if kind.is_of_pairs)
        data, answers = _one_of_each_pair(data), replace(answers, loss=answers.loss or kind)
    ports = needed_inputs(model, answers.prediction)
    # A run reads every input of the graph, those that the prediction does not depend on, too.
    held = {feature.name for feature in data.features}
    ports += [port for port in model.inputs if port.name in held and port not in ports]
    found = assign(model, ports, data.features, answers.label)
    operations = [f"{feature.name}={op}" for feature, one in found.chosen.values() for op in one.operations]
    made = _derived(found, operations)
    if found.missing and not made:
        raise missing_inputs(model, found.missing, data.features)
    loss = own_loss(model)
    if loss is not None and answers.loss is None and answers.label is None:
        match = Match(task=loss_of_output(loss), label=None)
        return _complete(model, data, match, found, operations, None, folder)
    feature, questions = choose_label(model, found.left, answers.label, data.features)
    if feature is None:
        return _without_label(model, data, answers, found, operations, folder)
    classes = data.categories.get(feature.name, data.classes if feature.name == "label" else ())
    task = find_task(model, Label(feature, tuple(classes)), answers.prediction, answers.loss)
    task = _with_cast(task, feature)
    if of_pairs and not is_asked:
        task = replace(task, loss=(replace(task.loss[0], reason=_OF_PAIRS), *task.loss[1:]))
    match = Match(task=task, label=free_label_name(model, feature.name), questions=questions)
    return _complete(model, data, match, found, operations, feature, folder)


def _one_of_each_pair(data: DataFacts) -> DataFacts:
    """The chosen answers: what the model reads, since a loss of pairs computes both as samples."""
    features = (
        replace(one, shape=one.shape[1:], values=None if one.values is None else one.values[:, 0])
        for one in data.features
    )
    return replace(data, features=tuple(features))


def _with_cast(task: Task, feature: Feature) -> Task:
    """Labels of a type that shards or losses do not take, as bool."""
    return replace(task, cast="float32") if feature.dtype == "bool" and not task.cast else task


def _derived(found: FeatureAssignment, operations: list[str]) -> bool:
    """Adds the operations that make missing inputs from token ids; whether all could be made."""
    tokens = next((one for one, _ in found.chosen.values() if one.is_integer and len(one.shape) == 1), None)
    if tokens is None:
        return not found.missing
    made = [synthesized(port, tokens.name) for port in found.missing]
    operations += [one for one in made if one is not None]
    return all(made)


def _without_label(
    model: ModelFacts, data: DataFacts, answers: Answers, found: FeatureAssignment, operations: list[str], folder: Path
) -> Match:
    """Data of inputs alone: the next token, or the input itself, may be what is learned."""
    for port in candidates(model, answers.prediction):
        tokens = next((one for one, _ in found.chosen.values() if one.is_integer and len(one.shape) == 1), None)
        if tokens is not None and port.sample is not None and len(port.sample) == 2:
            return _next_token(model, data, answers, found, operations, tokens, folder)
        for name, (feature, _) in found.chosen.items():
            wanted = model.port(name)
            if wanted is not None and wanted.sample == port.sample and wanted.is_float and wanted.sample:
                return _autoencoder(model, data, found, operations, feature, wanted, port, folder)
    listed = ", ".join(f"{one.name!r} {one.dtype} {list(one.shape)}" for one in data.features)
    raise DataError(
        f"{str(data.path)!r} holds no label: its features ({listed}) are all inputs of the model. Add a "
        "feature 'label' with an entry for each sample."
    )


def _next_token(
    model: ModelFacts,
    data: DataFacts,
    answers: Answers,
    found: FeatureAssignment,
    operations: list[str],
    tokens: Feature,
    folder: Path,
) -> Match:
    if data.kind == "packed":
        raise DataError(
            f"{str(data.path)!r} holds {tokens.name!r} but no labels. Pack it again with --transform "
            f"{tokens.name}=next-token:labels, or run onward init on the data that it was packed from."
        )
    from onward.proposal.causality import is_causal  # runs the model

    if not is_causal(model):
        raise DataError(
            f"{str(model.path)!r} attends to later tokens, so it cannot be trained to predict the next token, "
            f"and {str(data.path)!r} holds no labels. {_TEXT_NEEDS}"
        )
    name = free_label_name(model, "labels")
    operations.append(f"{tokens.name}=next-token:{name}")
    assert tokens.values is not None
    shifted = np.concatenate([tokens.values[:, 1:], np.full((len(tokens.values), 1), IGNORED_LABEL)], axis=1)
    task = find_task(
        model,
        Label(Feature(name=name, dtype="int64", shape=tokens.shape, values=shifted)),
        answers.prediction,
        answers.loss,
    )
    task = replace(task, kind="language_model", text="predicting the next token")
    return _complete(model, data, Match(task=task, label=name), found, operations, None, folder)


def _autoencoder(
    model: ModelFacts,
    data: DataFacts,
    found: FeatureAssignment,
    operations: list[str],
    feature: Feature,
    wanted: Port,
    port: Port,
    folder: Path,
) -> Match:
    loss = (
        Choice("loss.type", "mean_squared_error", f"there is no label, and {port} has the shape of its input."),
        Choice("loss.prediction", port.name),
    )
    task = Task(kind="regression", text="reconstructing the input", prediction=port.name, loss=loss)
    return _complete(model, data, Match(task=task, label=wanted.name), found, operations, None, folder)


def _complete(
    model: ModelFacts,
    data: DataFacts,
    match: Match,
    found: FeatureAssignment,
    operations: list[str],
    label: Feature | None,
    folder: Path,
) -> Match:
    """Names, and what packing has to do."""
    names = {feature.name: port for port, (feature, _) in found.chosen.items() if feature.name != port}
    if label is not None and match.label is not None and label.name != match.label:
        names[label.name] = match.label
    used = {feature.name for feature, _ in found.chosen.values()} | ({label.name} if label is not None else set())
    unused = [one.name for one in data.features if one.name not in used]
    task = match.task
    if label is not None:
        operations = [*operations, *(f"{label.name}={operation}" for operation in task.operations)]
    casts = [(feature.name, one.cast) for feature, one in found.chosen.values() if one.cast]
    casts += [(label.name, task.cast)] if label is not None and task.cast else []
    reasons = [f"{feature.name}: {why}" for feature, one in found.chosen.values() for why in one.reasons]
    reasons += [f"{label.name}: {why}" for why in task.reasons] if label is not None else []
    if data.kind == "packed":
        _refuse_operations(data, operations, casts, reasons)
        return replace(match, name_map={**names, **dict.fromkeys(unused, "")})
    arrays = tuple(one.name for one in data.features if one.name in used) if unused else ()
    pairs = tuple((one.partition("=")[0], one.partition("=")[2]) for one in operations)
    order = "" if label is None else order_of_labels(label, data.sample_count)
    buffer = _shuffle_buffer(data) if order else 0
    options = PackOptions(source=ArrayOptions(arrays), transform=pairs, cast=tuple(casts), shuffle_buffer=buffer)
    if order:
        reasons.append(f"the samples {order}: they are shuffled during packing")
    return replace(
        match, name_map=names, packing=Packing(source=data.path, folder=folder, options=options, reasons=tuple(reasons))
    )


def _refuse_operations(
    data: DataFacts, operations: list[str], casts: list[tuple[str, str]], reasons: list[str]
) -> None:
    operations = [one for one in operations if not _is_one_number(one)]
    if not operations and not any(dtype != "float32" for _, dtype in casts):
        return
    options = " ".join([f"--transform {one}" for one in operations] + [f"--cast {n}={d}" for n, d in casts])
    raise DataError(
        f"the shards of {str(data.path)!r} do not fit the model as they are ({'; '.join(reasons) or options}). Run "
        f"onward init on the data that they were packed from, or pack them again with {options}."
    )


def _is_one_number(operation: str) -> bool:
    """Whether an operation only adds or removes sizes of 1 of a single number, which batches do by themselves."""
    _, _, sizes = operation.partition("reshape:")
    return "reshape:" in operation and all(size in ("1", "") for size in sizes.split("x"))


def _shuffle_buffer(data: DataFacts) -> int:
    """How many samples are mixed: all, within reason."""
    sample_bytes = sum(max(1, math.prod(one.shape)) * 8 for one in data.features)
    return min(data.sample_count, max(1, (1 << 30) // sample_bytes))
