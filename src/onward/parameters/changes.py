"""Which fields two runs differ in that may change a result: for a sweep's table, and for a run that is resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onward.parameters.local_sgd import FIELDS
from onward.spelling import shortened

if TYPE_CHECKING:
    from onward.parameters import Parameters

REPORTS_AND_PLACES = (
    "paths.output_dir",
    "checkpoint.",
    "tensorboard.",
    "wandb.",
    "mlflow.",
    "aim.",
    "profiler.",
    "training.display_loss_steps",
)
"""Fields, or beginnings of their names, that say where a run writes and what it reports."""

MACHINES = ("distributed.", "machine.", "speed.", "recompute.", "limits.")
"""Sections that change how a result is computed, and the result by rounding alone."""

_DECIDE_TENSORS = (
    "optimizer.training_optimizer_name",
    "optimizer.",
    "training.weights_to_train",
    "training.weights_not_to_train",
    "training.train_last",
    "training.unfreeze",
    "training.freeze_batch_norm",
    "training.tied_weights",
    "training.untied_weights",
    "adapter.",
    "distillation.",
    "frozen_weights.",
    "head.",
    "loss.",
    "mixed_precision.",
    "quantize_aware.",
)
"""Fields, or beginnings of their names, by which the tensors of a checkpoint may differ; the likeliest first."""

_DECIDE_NUMBERS = ("optimizer.max_norm_clip", "optimizer.layer_decay", "mixed_precision.loss_scale")

_FOUND_IN_DATA = tuple(
    f"training.{name}" for name in ("num_epochs", "num_train_steps", "evaluation_period", "evaluation_period_epochs")
)
_IN_STEPS = (*_FOUND_IN_DATA, "learning_rate.warmup_steps")
_LOCAL_SGD = tuple(f"distributed.{name}" for name in FIELDS)
_FOUND_BY_TRIAL = ("training.batch_size", "training.eval_batch_size", "training.gradient_accumulation_steps")
_SHOWN = 8


def flat_fields(value: Any, name: str = "", base: str = "") -> Iterator[tuple[str, Any]]:
    """`section.field` and value of every field, the elements of lists one by one; `base` is cut off paths."""
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from flat_fields(one, f"{name}.{key}" if name else str(key), base)
    elif isinstance(value, list | tuple) and value:
        for number, one in enumerate(value):
            yield from flat_fields(one, f"{name}[{number}]", base)
    else:
        yield name, value.removeprefix(base) if isinstance(value, str) else value


def changed_fields(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Field -> what it was and what it is, of fields as `flat_fields` gives them."""
    now = json.loads(json.dumps(now))
    return {
        name: (earlier.get(name), now.get(name))
        for name in dict.fromkeys((*now, *earlier))
        if earlier.get(name) != now.get(name)
    }


def reason_for_other_tensors(rounds: Sequence[Parameters], record: Mapping[str, Any]) -> str:
    """Which fields were changed that decide which tensors a checkpoint has; "": none, or the record does not say.

    Args:
        rounds: the present parameters, of every round.
        record: of the checkpoint, with the parameters of its round.
    """
    now = _round_of(rounds, record)
    if now is None:
        return ""
    changed = changed_fields(_by_field(record["parameters"]), _by_field(now.to_mapping()))
    if "optimizer.training_optimizer_name" in changed:  # what goes with the other one explains no more
        changed = {name: both for name, both in changed.items() if not name.startswith("optimizer.")} | {
            "optimizer.training_optimizer_name": changed["optimizer.training_optimizer_name"]
        }
    ordered = dict.fromkeys(
        name
        for beginning in _DECIDE_TENSORS
        for name in changed
        if name.startswith(beginning) and name not in _DECIDE_NUMBERS
    )
    return shortened(sentences_on_changes({name: changed[name] for name in ordered}), _SHOWN // 2, "; ")


def _round_of(rounds: Sequence[Parameters], record: Mapping[str, Any]) -> Parameters | None:
    """The present parameters of the round that a checkpoint is of; None: it does not say, or there is no such round."""
    number = int(record.get("counters", {}).get("round", 0))
    return rounds[number] if "parameters" in record and number < len(rounds) else None


def _by_field(sections: Mapping[str, Any]) -> dict[str, Any]:
    """`section.field` and value, lists as they are."""
    return {
        f"{section}.{name}": value
        for section, fields in sections.items()
        if isinstance(fields, Mapping)
        for name, value in fields.items()
    }


def sentences_on_changes(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """`training.seed was 1, is now 2` for each field."""
    return [f"{name} was {was!r}, is now {now!r}" for name, (was, now) in changed.items()]


def notes_on_changes(rounds: Sequence[Parameters], record: Mapping[str, Any], step: int) -> list[str]:
    """What to report of a run that resumes with other fields than its checkpoint was trained with.

    Args:
        rounds: the present parameters, of every round.
        record: of the checkpoint, with the parameters of its round.
        step: how many steps of the round are done.
    """
    parameters = _round_of(rounds, record)
    if parameters is None:
        return []
    asked = parameters.training
    is_in_epochs = asked.num_epochs is not None or asked.evaluation_period_epochs is not None
    unknown = _FOUND_IN_DATA if is_in_epochs else ()
    is_elastic = parameters.distributed.elastic
    is_resized = asked.find_batch_size or asked.halve_batch_on_out_of_memory or is_elastic
    found = (*(_FOUND_BY_TRIAL if is_resized else ()), *(_IN_STEPS if is_elastic else unknown))
    left_out = (*REPORTS_AND_PLACES, *MACHINES, "next_rounds", *found)
    earlier, now = (
        {name: value for name, value in flat_fields(fields) if name in _LOCAL_SGD or not name.startswith(left_out)}
        for fields in (record["parameters"], parameters.to_mapping())
    )
    changed = changed_fields(earlier, now)
    if not changed:
        return []
    listed = shortened(sentences_on_changes(changed), _SHOWN, "; ")
    done = f"{step:,}" if asked.num_train_steps is None else f"{step:,} of {asked.num_train_steps:,}"
    return [
        f"the checkpoint was trained with other fields: {listed}. They hold from here on; steps are counted from the "
        f"start of the run, and {done} are done. To start a new run from these weights, export them (onward export "
        "MODEL --checkpoint DIR -o START.onnx) and train that file with another checkpoint.checkpoints_dir."
    ]
