"""Metrics of evaluations by name, computed by torchmetrics over all batches of a test set and all ranks that share it.

What a metric needs to know of the task is taken from the loss and the graph: task, classes, logits or probabilities.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.losses.registry import loss_named
from onward.parameters import Loss
from onward.parameters.evaluation import MetricRequest
from onward.spelling import did_you_mean, listed

ALIASES = {
    "f1": "f1score",
    "fbeta": "fbetascore",
    "r2": "r2score",
    "mse": "meansquarederror",
    "mae": "meanabsoluteerror",
}
"""Usual short names -> names of torchmetrics' classes without case."""

TASKS = ("binary", "multiclass", "multilabel")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric that can be computed.

    Attributes:
        title: under which it is reported.
        prediction: output of the graph.
        label: feature that it is compared with.
        make: a fresh torchmetrics object.
        prepare: (prediction, label) as it wants them.
        higher_is_better: None where that is not known.
    """

    title: str
    prediction: str
    label: str
    make: Callable[[], Any]
    prepare: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    higher_is_better: bool | None


class MetricSums:
    """What a pass over a test set gathers for its metrics."""

    def __init__(self, metrics: Sequence[Metric], device: torch.device) -> None:
        self._held = [(metric, metric.make().to(device)) for metric in metrics]

    def add(self, features: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """Counts one batch.

        Raises:
            ParametersError: torchmetrics refuses it.
        """
        for metric, held in self._held:
            prediction, label = values[metric.prediction].detach(), features[metric.label]
            try:
                held.update(*metric.prepare(prediction, label))
            except (ValueError, RuntimeError, TypeError) as error:
                raise ParametersError(
                    f"training.metrics: {metric.title!r} cannot be computed from {metric.prediction!r} "
                    f"{list(prediction.shape)} and {metric.label!r} {list(label.shape)}: {_first_line(error)} "
                    "Correct its options, or remove it."
                ) from error

    def compute(self, group: Any) -> dict[str, float]:
        """The metrics of all batches; of those of all ranks of `group`, where each has a part of the test set."""
        found: dict[str, float] = {}
        for metric, held in self._held:
            if group is not None:
                held.sync(process_group=group, distributed_available=lambda: True)
            value = held.compute()
            if not isinstance(value, torch.Tensor) or value.ndim > 1:
                raise ParametersError(
                    f"training.metrics: {metric.title!r} is {_describe(value)}; expected a number, or a list with "
                    "one for each class. Remove it, or choose options that reduce it."
                )
            numbers = value.double().reshape(-1).tolist()
            named = {metric.title: numbers[0]} if value.numel() == 1 else {}
            found |= named or {f"{metric.title}/{index}": number for index, number in enumerate(numbers)}
        return found


def make_metrics(requests: Sequence[MetricRequest], loss: Loss, graph: TrainingGraph) -> tuple[Metric, ...]:
    """The metrics that are asked for, but those that every evaluation has.

    Raises:
        ParametersError: torchmetrics is not installed or has no such metric, an option is wrong, or what to compare is
            not known.
    """
    assert graph.loss_names is not None
    # "accuracy" of class labels is counted by the graph itself.
    counted = graph.loss_names.counted is not None and loss_named(loss.type).accuracy == "accuracy"
    wanted = [r for r in requests if not (counted and r == MetricRequest(name="accuracy", title="accuracy"))]
    return tuple(_make(request, loss, graph) for request in wanted)


def _make(request: MetricRequest, loss: Loss, graph: TrainingGraph) -> Metric:
    kind = _find_class(request)
    compared = loss_named(loss.type).compared(loss)
    prediction, label = request.prediction or compared[0], request.label or compared[1]
    where = f"training.metrics: {request.title!r}"
    if prediction is None or label is None:
        raise ParametersError(
            f"{where}: with loss.type {loss.type!r} it is unknown what to compare. Set prediction (an output of the "
            f"model) and label (a feature of the data), such as {{name: {request.name}, prediction: ..., label: ...}}."
        )
    shapes = {str(value.name): value.shape for value in graph.model.graph.outputs}
    if prediction not in shapes:
        listed = ", ".join(repr(str(v.name)) for v in graph.source.graph.outputs)
        raise ParametersError(f"{where}: {prediction!r} is not an output of the model; its outputs are: {listed}.")
    inputs = [str(value.name) for value in graph.model.graph.inputs]
    if label not in inputs and loss_named(loss.type).add is not None:
        raise ParametersError(
            f"{where}: {label!r} is not a label or input of the run; those are: {', '.join(map(repr, inputs))}."
        )
    shape = [size if isinstance(size, int) else None for size in shapes[prediction] or ()]
    options, prepare = _settings(kind, request, loss, shape, graph.loss_names is not None and _is_probable(graph))

    def make() -> Any:
        return kind(**options, sync_on_compute=False)

    try:
        held = make()
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        raise ParametersError(f"{where} cannot be created with {options}: {_first_line(error)}") from error
    return Metric(
        title=request.title,
        prediction=prediction,
        label=label,
        make=make,
        prepare=prepare,
        higher_is_better=held.higher_is_better,
    )


def _is_probable(graph: TrainingGraph) -> bool:
    assert graph.loss_names is not None
    return graph.loss_names.holds_probabilities


def _find_class(request: MetricRequest) -> Any:
    """The class of torchmetrics that a name means, whatever its case and underscores."""
    try:
        library = importlib.import_module("torchmetrics")
    except ImportError as error:
        raise ParametersError(
            f"training.metrics names {request.name!r}, which the package torchmetrics computes; install it with pip "
            "install 'onward[metrics]', or remove the metric."
        ) from error
    text = importlib.import_module("torchmetrics.text")
    classes = {}
    for module in (library, text):  # the names of text in the library itself are deprecated
        for name in dir(module):
            one = getattr(module, name)
            if inspect.isclass(one) and issubclass(one, library.Metric) and one is not library.Metric:
                classes[name.lower()] = one
    plain = request.name.lower().replace("_", "").replace("-", "")
    found = classes.get(ALIASES.get(plain, plain))
    if found is None:
        hint = did_you_mean(plain, [*classes, *ALIASES], most=3)
        raise ParametersError(
            f"training.metrics: torchmetrics has no metric {request.name!r}.{hint} Expected one of its classes."
        )
    return found


Prepare = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _settings(
    kind: Any, request: MetricRequest, loss: Loss, shape: Sequence[int | None], are_probabilities: bool
) -> tuple[dict[str, Any], Prepare]:
    """Options of a metric, those that follow from loss and graph filled in, and how its arguments are prepared."""
    options, axis = dict(request.options), loss.class_axis
    known = inspect.signature(kind.__new__ if "task" in inspect.signature(kind.__new__).parameters else kind).parameters
    if "task" not in known:
        if kind.__name__ == "Perplexity":
            options |= (
                {} if loss.ignore_index is None else {"ignore_index": options.get("ignore_index", loss.ignore_index)}
            )
            return options, lambda p, t: (_classes_last(p.float(), axis), t.reshape(t.shape[0], -1).long())
        if "multioutput" in known and "num_outputs" in known and len(shape) > 1 and (shape[-1] or 1) > 1:
            options.setdefault("num_outputs", shape[-1])
        return options, _as_numbers(keeps_columns="multioutput" in known)
    task = request.task or _task_of(request, loss, shape)
    if task not in TASKS:
        raise ParametersError(
            f"training.metrics: task of {request.title!r} is {task!r}; expected one of {', '.join(TASKS)}."
        )
    options["task"] = task
    if loss.ignore_index is not None and "ignore_index" in known:
        options.setdefault("ignore_index", loss.ignore_index)
    sigmoid = not are_probabilities and (loss_named(loss.type).task != "binary" or loss.from_logits)
    if task == "multiclass":
        options.setdefault("num_classes", _classes(request, shape, axis))
        return options, _as_classes(axis, not are_probabilities, loss.dense_labels and request.label is None)
    if task == "multilabel":
        options.setdefault("num_labels", _classes(request, shape, 1))
        return options, lambda p, t: (_probabilities(p, sigmoid), t.reshape(p.shape).long())
    return options, lambda p, t: (_probabilities(p, sigmoid).reshape(-1), t.reshape(-1).long())


def _task_of(request: MetricRequest, loss: Loss, shape: Sequence[int | None]) -> str:
    task = loss_named(loss.type).task
    if not task:
        raise ParametersError(
            f"training.metrics: {request.title!r} is a classification metric, and loss.type {loss.type!r} does not "
            f"determine its task. Set task: {listed(TASKS)}."
        )
    return "multilabel" if task == "binary" and len(shape) == 2 and shape[1] != 1 else task


def _classes(request: MetricRequest, shape: Sequence[int | None], axis: int) -> int:
    size = shape[axis] if -len(shape) <= axis < len(shape) else None
    if size is None:
        raise ParametersError(
            f"training.metrics: {request.title!r} needs the number of classes, which the model's output does not fix. "
            "Set num_classes (num_labels for multilabel) in its entry."
        )
    return size


def _as_classes(axis: int, takes_softmax: bool, are_dense: bool) -> Prepare:
    def prepare(prediction: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = prediction.float().movedim(axis, 1)
        labels = label.movedim(axis, 1).argmax(dim=1) if are_dense else label.long()
        scores = scores.softmax(dim=1) if takes_softmax else scores
        return scores, labels.reshape(scores.shape[0], *scores.shape[2:])

    return prepare


def _as_numbers(keeps_columns: bool) -> Prepare:
    def prepare(prediction: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = prediction.float()
        several = keeps_columns and values.ndim > 1 and values.shape[-1] > 1
        shape = (-1, values.shape[-1]) if several else (-1,)
        return values.reshape(shape), label.float().reshape(values.shape).reshape(shape)

    return prepare


def _probabilities(prediction: torch.Tensor, takes_sigmoid: bool) -> torch.Tensor:
    return prediction.float().sigmoid() if takes_sigmoid else prediction.float()


def _classes_last(prediction: torch.Tensor, axis: int) -> torch.Tensor:
    scores = prediction.movedim(axis, -1)
    return scores.reshape(scores.shape[0], -1, scores.shape[-1])


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if text.endswith(".") else f"{text}."
