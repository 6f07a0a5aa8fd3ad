"""From the arguments of `fit` to `Parameters`: the loss and what it compares, batches, steps, further sections."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from onward.data.batches import BatchSource
from onward.data.sources.iterated import IteratedDataLoader
from onward.errors import ParametersError
from onward.losses import registry
from onward.parameters import Loss, Parameters
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.proposal.matching import is_label_name

DEFAULT_BATCH_SIZE = 32
DEFAULT_LEARNING_RATE = 1e-3
MOST_HISTORY_ROWS = 100
"""Displayed updates of a fit at most; where it has more, every n-th is displayed."""
MOST_LOG_LINES = 20
"""Lines about them where there is no terminal, about as many as a proposed RUN.yaml asks for."""


@dataclass(frozen=True)
class ModelPorts:
    """What a model takes and gives.

    Attributes:
        path: its file.
        inputs: names in order -> rank, batch axis included; None: unknown.
        outputs: names in order.
        limits: what the file may ask of the machine.
    """

    path: Path
    inputs: Mapping[str, int | None]
    outputs: tuple[str, ...]
    limits: Limits = DEFAULT_LIMITS


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the arguments of `fit` say in addition to model and data; None: to be found out, or the default."""

    loss: Any = None
    label: str | None = None
    prediction: str | None = None
    epochs: float | None = None
    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    optimizer: str | None = None
    gradient_accumulation_steps: int = 1
    shuffle: bool = True
    seed: int = 0
    weights_to_train: Sequence[str] = ()
    weights_not_to_train: Sequence[str] = ()
    adapter: int | Mapping[str, Any] | None = None
    input_name_map: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[Any] | Mapping[str, Callable[..., Any]] = ()
    output_dir: str | os.PathLike[str] | None = None
    checkpoints_dir: str | os.PathLike[str] | None = None
    log_dir: str | os.PathLike[str] | None = None
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def loss_of(wanted: Wanted, model: ModelPorts, features: Sequence[str]) -> Loss:
    """The loss as `Parameters` have it: a name is completed by the model's output and the data's label.

    Raises:
        ParametersError: the name is unknown, or the output or feature is ambiguous.
    """
    loss = wanted.loss
    if isinstance(loss, Loss):
        return loss
    if callable(loss):
        return Loss(type="function", function=loss)
    if isinstance(loss, Mapping):
        return Loss(**loss)
    short = {kind.short_name: kind.name for kind in registry.LOSSES if kind.short_name}
    kind = next((one for one in registry.LOSSES if isinstance(loss, str) and one.name == short.get(loss, loss)), None)
    if not isinstance(loss, str) or (kind is not None and kind.add is None):
        raise ParametersError(f"loss is {loss!r}; expected a name, a Loss, or a function of (outputs, batch).")
    if kind is None:
        names = ", ".join([*(one.name for one in registry.LOSSES), *short])
        raise ParametersError(f"loss is {loss!r}; expected one of {names}, a Loss or a function.")
    if kind.required not in (("prediction",), ("prediction", "label")):
        raise ParametersError(f"loss {loss!r} needs further fields; pass loss=Loss(type={kind.name!r}, ...) with them.")
    prediction = wanted.prediction or _only("prediction", "output of the model", model.outputs, model, features)
    if kind.is_an_output:
        return Loss(type=kind.name, prediction=prediction)
    # With from_logits, an output that is a probability already is recognized and not squashed again.
    label = label_of(wanted, model, features)
    return Loss(type=kind.name, prediction=prediction, label=label, from_logits="from_logits" in kind.reads)


def label_of(wanted: Wanted, model: ModelPorts, features: Sequence[str]) -> str:
    """The feature of the data that is the label: as asked, else the one that is no input of the model."""
    if wanted.label is not None:
        return wanted.label
    spare = [name for name in features if name not in model.inputs]
    named = [name for name in spare if is_label_name(name)]
    return named[0] if len(named) == 1 else _only("label", "feature that is no input", spare, model, features)


def _only(what: str, kind: str, found: Sequence[str], model: ModelPorts, features: Sequence[str]) -> str:
    if len(found) == 1:
        return found[0]
    raise ParametersError(
        f"the loss needs one {kind}, and there are {len(found)}. The outputs of the model are "
        f"{_listed(model.outputs)}, its inputs {_listed(model.inputs)}; the data hold {_listed(features)}. Pass "
        f"{what}='...'."
    )


def no_loss(model: ModelPorts, features: Sequence[str]) -> ParametersError:
    """What is raised where no loss is given and none can be proposed."""
    return ParametersError(
        f"loss is missing. The outputs of the model are {_listed(model.outputs)}; the data hold {_listed(features)}. "
        "Pass loss='softmax_cross_entropy' for class numbers, 'mean_squared_error' for regression, "
        "'binary_cross_entropy' for labels of 0 and 1, or a function of (outputs, batch) that returns a torch scalar."
    )


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names)) or "none"


def parameters_of(
    wanted: Wanted,
    model: ModelPorts,
    loss: Loss,
    source: BatchSource,
    has_validation: bool,
    agree: Callable[[int], int] = int,
) -> Parameters:
    """All of it as `Parameters`; `parameters` among the arguments win.

    Args:
        wanted: the arguments.
        model: what is trained.
        loss: what it minimizes.
        source: of the training batches.
        has_validation: whether there is something to evaluate.
        agree: a rank's steps -> the steps of all ranks.

    Raises:
        ParametersError: with every field that is wrong.
    """
    size = wanted.batch_size or _own_batch_size(source) or DEFAULT_BATCH_SIZE
    steps = agree(steps_of(wanted, source, size))
    accumulation = wanted.gradient_accumulation_steps
    updates = max(1, steps // accumulation)
    plain: dict[str, dict[str, Any]] = {
        "paths": {"model_path": model.path, "output_dir": wanted.output_dir},
        "training": {
            "batch_size": size,
            "num_train_steps": steps,
            "gradient_accumulation_steps": accumulation,
            "display_loss_steps": math.ceil(updates / MOST_HISTORY_ROWS),
            "evaluation_period": _steps_of_epoch(source, size) if has_validation else 0,
            "seed": wanted.seed,
            "weights_to_train": tuple(wanted.weights_to_train),
            "weights_not_to_train": tuple(wanted.weights_not_to_train),
            "metrics": () if isinstance(wanted.metrics, Mapping) else tuple(wanted.metrics),
        },
        "learning_rate": {
            "initial_lr": DEFAULT_LEARNING_RATE if wanted.learning_rate is None else wanted.learning_rate
        },
        "data": {
            "shuffle_data": wanted.shuffle,
            "input_name_map": dict(wanted.input_name_map),
            "last_batch": "short" if isinstance(source, IteratedDataLoader) else "wrap",
        },
        "adapter": {"rank": wanted.adapter} if isinstance(wanted.adapter, int) else dict(wanted.adapter or {}),
        "optimizer": {"training_optimizer_name": wanted.optimizer or "AdamW"},
        "checkpoint": {"checkpoints_dir": wanted.checkpoints_dir},
        "tensorboard": {"log_dir": wanted.log_dir},
    }
    for section, fields in wanted.parameters.items():
        if not isinstance(fields, Mapping):
            raise ParametersError(f"parameters[{section!r}] is {fields!r}; expected a dictionary of fields.")
        plain[section] = {**plain.get(section, {}), **fields}
    if not plain["training"]["metrics"]:
        del plain["training"]["metrics"]
    if {"num_epochs", "num_updates"} & plain["training"].keys():
        del plain["training"]["num_train_steps"]
    named = plain.pop("loss", {})
    return Parameters.from_mapping({**plain, "loss": dataclasses.replace(loss, **named)})


def displays_by_default(wanted: Wanted) -> bool:
    """Whether `parameters` leave open which updates are displayed."""
    return "display_loss_steps" not in wanted.parameters.get("training", {})


def steps_of(wanted: Wanted, source: BatchSource, size: int) -> int:
    """Steps of the run: as asked, else those of the epochs, rounded up to full updates.

    Raises:
        ParametersError: epochs are asked for of data whose length is not known, or that can be read once only.
    """
    accumulation = wanted.gradient_accumulation_steps
    if wanted.steps is not None:
        if wanted.epochs is not None:
            raise ParametersError(f"epochs is {wanted.epochs:g} and steps is {wanted.steps}; pass one of the two.")
        return wanted.steps
    epochs = 1.0 if wanted.epochs is None else wanted.epochs
    if not epochs > 0:
        raise ParametersError(f"epochs is {epochs:g}; expected a number above 0.")
    samples: int | None = getattr(source, "sample_count", None)
    batches = _own_batch_count(source)
    length = Fraction(samples or 0, size) if batches is None else Fraction(batches)
    if not length:
        raise ParametersError(
            f"epochs is {epochs:g}, but the number of samples in the data ({type(source).__name__}) is unknown. Pass "
            "steps=... instead."
        )
    asked = Fraction(epochs).limit_denominator(1_000_000)
    # Batches that are assembled here continue into the next epoch.
    exact = math.ceil(asked * length)
    return max(1, -(-exact // accumulation)) * accumulation


def _own_batch_size(source: BatchSource) -> int | None:
    return source.batch_size if isinstance(source, IteratedDataLoader) else None


def _own_batch_count(source: BatchSource) -> int | None:
    """Batches of an epoch of a source that makes them itself."""
    return source.item_count if isinstance(source, IteratedDataLoader) and source.gives_batches else None


def _steps_of_epoch(source: BatchSource, size: int) -> int:
    """Batches of an epoch, the last one included; 0 where that is not known."""
    samples = getattr(source, "sample_count", None)
    return _own_batch_count(source) or (0 if samples is None else max(1, -(-samples // size)))
