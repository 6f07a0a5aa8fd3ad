"""What the user asked: an entire run, loaded from RUN.yaml or built in Python, and checked in full before any work.

Types are checked by pydantic, the sense of fields in combination by `check`; nothing here knows torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from onward.errors import ParametersError
from onward.parameters.adapter import Adapter
from onward.parameters.augmentation import Augmentation
from onward.parameters.averaging import Averaging
from onward.parameters.checks import find_problems
from onward.parameters.distillation import Distillation
from onward.parameters.distributed import Distributed, Recompute
from onward.parameters.evaluation import EarlyStopping, OnBadLoss
from onward.parameters.field_types import STRICT
from onward.parameters.frozen_weights import FrozenWeights
from onward.parameters.head import Head
from onward.parameters.limits import Limits
from onward.parameters.loss import Loss
from onward.parameters.optimizer import Optimizer
from onward.parameters.paths import Data, Paths
from onward.parameters.pruning import Pruning
from onward.parameters.quantize_aware import QuantizeAware
from onward.parameters.renamed import with_new_names
from onward.parameters.reporting import Checkpoint, Profiler, TensorBoard
from onward.parameters.speed import Machine, MixedPrecision, Speed
from onward.parameters.trackers import Aim, Mlflow, Wandb
from onward.parameters.training import LearningRate, Training
from onward.parameters.yaml_file import overlay, override, read_yaml, resolve_paths, sentences, to_plain
from onward.remote.files import url_of
from onward.untrusted_files import validated


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """An entire run, as the user asked for it; never written back to.

    `next_rounds` are the rounds after the first (BERT's second phase): in a RUN.yaml each holds only the fields that
    differ from the first round. What a run is built from (model, loss, optimizer, precision, ...) stays the same.
    """

    __pydantic_config__ = STRICT
    paths: Paths = field(default_factory=Paths)
    loss: Loss
    training: Training
    learning_rate: LearningRate
    data: Data = field(default_factory=Data)
    adapter: Adapter = field(default_factory=Adapter)
    augmentation: Augmentation = field(default_factory=Augmentation)
    head: Head = field(default_factory=Head)
    optimizer: Optimizer = field(default_factory=Optimizer)
    distillation: Distillation = field(default_factory=Distillation)
    quantize_aware: QuantizeAware = field(default_factory=QuantizeAware)
    pruning: Pruning = field(default_factory=Pruning)
    averaging: Averaging = field(default_factory=Averaging)
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    frozen_weights: FrozenWeights = field(default_factory=FrozenWeights)
    speed: Speed = field(default_factory=Speed)
    distributed: Distributed = field(default_factory=Distributed)
    recompute: Recompute = field(default_factory=Recompute)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    on_bad_loss: OnBadLoss = field(default_factory=OnBadLoss)
    tensorboard: TensorBoard = field(default_factory=TensorBoard)
    wandb: Wandb = field(default_factory=Wandb)
    mlflow: Mlflow = field(default_factory=Mlflow)
    aim: Aim = field(default_factory=Aim)
    profiler: Profiler = field(default_factory=Profiler)
    machine: Machine = field(default_factory=Machine)
    limits: Limits = field(default_factory=Limits)
    next_rounds: tuple[Parameters, ...] = ()

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, str] | None = None) -> Parameters:
        """Reads a RUN.yaml.

        Args:
            path: the file; paths in it are relative to its folder.
            overrides: `section.field` -> value written as in YAML, as `onward train --section.field value` gives them.
                Paths among them are relative to the working folder.

        Raises:
            ParametersError: every field that is unknown, missing, of the wrong type or impossible, in one message.
        """
        path = Path(path)
        raw = _written_out(read_yaml(path))
        for dotted, text in (overrides or {}).items():
            override(raw, dotted, text)
        return cls.from_mapping(
            raw,
            base=(path if url_of(path) is not None else path.resolve()).parent,
            overridden=frozenset(overrides or {}),
        )

    @classmethod
    def from_mapping(
        cls, raw: Mapping[str, Any], base: Path | None = None, overridden: frozenset[str] = frozenset()
    ) -> Parameters:
        """Builds parameters from nested mappings, sections to fields; relative paths are taken from `base`."""
        written = _written_out(raw)
        sections = with_new_names({name: {} if value is None else value for name, value in written.items()})
        later = sections.pop("next_rounds", None) or ()
        if not isinstance(later, list | tuple):
            raise ParametersError(f"next_rounds is {later!r}; expected a list, one entry for each later round.")

        def read(round_sections: Mapping[str, Any], where: str) -> Parameters:
            parameters = _validate(round_sections, where)
            return parameters if base is None else resolve_paths(parameters, base, overridden)

        first = read(sections, "")
        places = [f"next_rounds[{number}]" for number in range(len(later))]
        rounds = tuple(
            read(overlay(sections, with_new_names(changes, f"{where}."), where), f"{where}.")
            for where, changes in zip(places, later, strict=True)
        )
        return check(dataclasses.replace(first, next_rounds=rounds))

    @property
    def model_files(self) -> tuple[Path, ...]:
        """The files of the model to train: one for each stage where `distributed.pipeline_stage_paths` is given."""
        single = self.paths.model_path
        return self.distributed.pipeline_stage_paths or (() if single is None else (single,))

    def to_mapping(self) -> dict[str, Any]:
        """Nested dictionaries of plain values, as they go into a checkpoint; a function is named, not stored."""
        return typing.cast(dict[str, Any], to_plain(self))


def _written_out(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Sections with what is short for a field of them."""
    short = {"distributed": {"layout": "auto"}} if raw.get("distributed") == "auto" else {}
    return {**raw, **short}


def check(parameters: Parameters) -> Parameters:
    """Checks types, and fields in combination, of all rounds.

    Returns:
        The same parameters, every field of its declared type: a path given as text is a Path, a list a tuple.

    Raises:
        ParametersError: with every problem found, each with field, value, what was expected and what to do.
    """
    parameters = _validate(parameters)
    problems = find_problems(parameters)
    if problems:
        raise ParametersError("\n".join(problems))
    return parameters


def _validate(raw: Any, where: str = "") -> Parameters:
    try:
        return validated(Parameters, raw)
    except pydantic.ValidationError as error:
        raise ParametersError("\n".join(where + line for line in sentences(error, Parameters))) from error
