"""The sections `early_stopping` and `on_bad_loss` of RUN.yaml, and what a metric of `training.metrics` may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from onward.parameters.field_types import STRICT, Count, CountFromZero, NonNegative, Positive

MetricSpec = str | Mapping[str, Any]
"""A name, or a mapping with `name` and options."""


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """When a round ends before its last step, and which of its evaluations is the best.

    Attributes:
        metric: the evaluation metric to compare, `loss` or a name in `training.metrics`; also decides which
            checkpoint `checkpoint.keep_best` keeps.
        mode: `min`: smaller is better; `max`: larger is better; `auto`: decided by the metric's name.
        patience: evaluations in a row without improvement after which the round ends; absent: no early stopping.
        min_delta: the smallest change that counts as an improvement.
    """

    __pydantic_config__ = STRICT
    metric: str = "loss"
    mode: Literal["auto", "min", "max"] = "auto"
    patience: Count | None = None
    min_delta: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class OnBadLoss:
    """What a run does about losses, gradients and batch statistics that are not finite.

    Attributes:
        skip: weight updates in a row that are skipped, with weights and statistics as they were; one more ends the
            run, and its message names the files and samples. In fp16, updates from which the dynamic loss scale is
            still lowered do not count.
        spike_threshold: robust standard deviations (1.4826 times the median absolute deviation) above the median of the
            last updates at which a loss, or the logarithm of a gradient norm, is a spike: the run returns to its last
            checkpoint, trains again from there, and leaves out the data of that update; absent: spikes are accepted.
        spike_window: updates of which the median is taken.
        max_rollbacks: spikes after which the next one ends the run.
    """

    __pydantic_config__ = STRICT
    skip: CountFromZero = 10
    spike_threshold: Positive | None = None
    spike_window: Count = 128
    max_rollbacks: CountFromZero = 3


@dataclass(frozen=True, kw_only=True)
class MetricRequest:
    """One entry of `training.metrics`, read.

    Attributes:
        name: as the user writes it.
        title: under which it is reported.
        prediction, label, task: instead of those of the loss.
        options: of the metric itself.
    """

    name: str
    title: str
    prediction: str | None = None
    label: str | None = None
    task: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def read_metrics(specs: Sequence[MetricSpec]) -> tuple[MetricRequest, ...]:
    """The entries of `training.metrics`.

    Raises:
        ValueError: an entry has no name, or two are reported under the same; a sentence for the user.
    """
    found: dict[str, MetricRequest] = {}
    for index, spec in enumerate(specs):
        where = f"training.metrics[{index}]"
        options = {} if isinstance(spec, str) else dict(spec)
        name = spec if isinstance(spec, str) else options.pop("name", None)
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where} is {spec!r}; expected a name such as f1, or {{name: f1, average: macro}}.")
        own = {key: options.pop(key, None) for key in ("prediction", "label", "task")}
        wrong = [key for key, value in own.items() if value is not None and not isinstance(value, str)]
        if wrong:
            raise ValueError(f"{where}.{wrong[0]} is {own[wrong[0]]!r}; expected text.")
        title = options.pop("as", name)
        if not isinstance(title, str) or not title or title == "loss":
            raise ValueError(f"{where}.as is {title!r}; expected another name.")
        if title in found:
            raise ValueError(
                f"{where} is reported as {title!r}, as is an earlier entry. Set `as: NAME` in one of them."
            )
        found[title] = MetricRequest(
            name=name, title=title, prediction=own["prediction"], label=own["label"], task=own["task"], options=options
        )
    return tuple(found.values())
