"""EvaluateStep: means over an entire test set, by the trained graph or by a separate one with the same weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onward.data.batches import Batch
from onward.data.shard import FeatureSpec
from onward.engine.building.assembly import Assembly
from onward.engine.building.pipelined import PipelinedForward
from onward.engine.building.preparation import read_training_graph
from onward.engine.evaluating.metrics import Metric, MetricSums, make_metrics
from onward.engine.functions import FunctionMetrics, MetricFunction, Tensors, call_loss, features_on
from onward.engine.gradient_reduction import GradientReduction
from onward.engine.inputs.index_ranges import FeatureRange
from onward.engine.network.forward import Forward
from onward.engine.state import TrainState
from onward.errors import DataError, ParametersError
from onward.graph.losses.spec import LossNames
from onward.graph.training_graph import TrainingGraph, outputs_of
from onward.losses.labels import LabelCount
from onward.losses.registry import loss_named
from onward.lowering.module import OnnxModule
from onward.parallel.data_parallel import reshard
from onward.parameters import Loss, Parameters
from onward.parameters.evaluation import read_metrics
from onward.spelling import shortened


class Evaluator:
    """Evaluates a network as parameters say.

    Args:
        parameters: of the run; a separate evaluation model is read here.
        assembly: the trained network.
        feature_ranges: features that are class labels or pick rows -> which there are.
        functions: own metrics.

    Raises:
        ModelError: the separate model cannot be read or lowered.
        ParametersError: its weights are not those of the trained one, or are not unsharded on each process.
    """

    def __init__(
        self,
        parameters: Parameters,
        assembly: Assembly,
        feature_ranges: Mapping[str, FeatureRange],
        functions: Mapping[str, MetricFunction] | None = None,
    ) -> None:
        path = parameters.paths.eval_model_path
        evaluated = assembly.graph if path is None else _read_evaluation_graph(parameters, path, assembly)
        assert evaluated.loss_names is not None
        self._assembly = assembly
        averaging = parameters.averaging
        self._suffix = "" if averaging.kind is None else "_of_last" if averaging.export == "average" else "_of_average"
        self._is_shared_out = parameters.data.test_data == "partitioned"
        self._outputs = evaluation_outputs(evaluated.loss_names, parameters.loss)
        requests = () if parameters.training.skip_evaluation else read_metrics(parameters.training.metrics)
        self._metrics = make_metrics(requests, parameters.loss, evaluated)
        if "loss" in (functions or {}):
            raise ParametersError("metrics: 'loss' is what every evaluation has; choose another name.")
        self._functions = {**_own_loss(parameters.loss), **(functions or {})}
        self._check_functions(parameters)
        self._read = outputs_of(evaluated) if self._functions else ()
        predictions = (metric.prediction for metric in self._metrics)
        needed = tuple(dict.fromkeys((*self._outputs.names, *predictions, *self._read)))
        separate = None
        if path is not None:
            context = assembly.networks[0].net.context
            lower = assembly.precision.lower
            separate = OnnxModule(evaluated, needed, context=context, lower=lower).to(assembly.state.device)
        self._make_forward = functools.partial(assembly.evaluation, needed, feature_ranges, separate)
        self._forward: Forward | PipelinedForward | None = None

    @property
    def forward(self) -> Forward | PipelinedForward:
        """The forward pass, made once: lowering a large graph takes longer than a step of it."""
        if self._forward is None:
            self._forward = self._make_forward()
        return self._forward

    @property
    def directions(self) -> dict[str, bool | None]:
        """Every metric of an evaluation, with whether a larger one is better; None: that is not known."""
        losses = dict.fromkeys((*self._outputs.totals, *self._outputs.means), False)
        accuracy = {self._outputs.accuracy: True} if self._outputs.counted is not None else {}
        own = {name: False if name == "loss" else None for name in self._functions}
        found = {**losses, **own, **accuracy, **{metric.title: metric.higher_is_better for metric in self._metrics}}
        return found | {f"{name}{self._suffix}": better for name, better in found.items() if self._suffix}

    def _check_functions(self, parameters: Parameters) -> None:
        split = parameters.distributed
        if self._functions and split.horizontal_parallel_size * split.pipeline_parallel_size > 1:
            raise ParametersError(
                f"metrics: {', '.join(self._functions)} are functions of complete outputs, which no process has with "
                "horizontal_parallel_size or pipeline_parallel_size above 1; name metrics in training.metrics instead."
            )

    def check_specs(self, specs: Mapping[str, FeatureSpec]) -> None:
        """Checks what a test set says of its samples.

        Raises:
            DataError: they do not fit the model.
        """
        self.forward.reader.check_specs(specs)

    def evaluate(self, state: TrainState, one_pass: Callable[[], Iterable[Batch]]) -> tuple[dict[str, float], int]:
        """Metrics over all samples of a test set, and the number of samples; of average and last weights where a run
        keeps an average.

        Raises:
            DataError: the data are broken or do not fit.
        """
        with state.averaged(state.exports_average):
            metrics, samples = self._evaluate(state, one_pass())
        other = metrics
        if self._suffix and state.average is not None and state.average.count:
            with state.averaged(not state.exports_average):
                other, _ = self._evaluate(state, one_pass())
        return metrics | {f"{name}{self._suffix}": value for name, value in other.items() if self._suffix}, samples

    def _evaluate(self, state: TrainState, batches: Iterable[Batch]) -> tuple[dict[str, float], int]:
        reduction = self._assembly.reduction if self._is_shared_out else None
        for module in self._assembly.modules:
            reshard(module)  # between the micro-batches of an update, weights may be gathered that were swapped since
        try:
            own = FunctionMetrics(self._functions, self._read, state.device)
            return _evaluate(state, self.forward, self._outputs, self._metrics, own, batches, reduction)
        finally:
            for module in self._assembly.modules:
                reshard(module)


@dataclass(frozen=True, kw_only=True)
class EvaluationOutputs:
    """Which values of the evaluation pass become metrics, and what each is a mean over.

    Attributes:
        means: metric name -> value computed for each batch.
        correct, counted: values that count labels, those that were hit and all; None where there are no classes.
        are_sums: the values are sums over the batch; their metric is the sum over the test set by its samples.
        per_label: metrics that are means over labels, not over the samples -> over which.
        totals: metric name -> metrics that it is the sum of.
        accuracy: name of the metric that `correct` of `counted` are.
    """

    means: Mapping[str, str]
    correct: str | None = None
    counted: str | None = None
    are_sums: bool = False
    per_label: Mapping[str, LabelCount] = field(default_factory=dict)
    totals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    accuracy: str = "accuracy"

    @property
    def names(self) -> tuple[str, ...]:
        """All values, as the forward pass is to compute them."""
        return (*self.means.values(), *(n for n in (self.correct, self.counted) if n is not None))

    def share(self, metric: str, features: Mapping[str, Any], values: Mapping[str, Any], samples: int) -> Any:
        """What a batch's value weighs in the mean over the test set: what it is itself a mean over."""
        if metric not in self.per_label:
            return samples
        counted = self.per_label[metric]
        if counted.class_weights is None:
            assert self.counted is not None
            return values[self.counted]
        labels = features[counted.feature].long()
        if counted.ignored is not None:
            labels = labels[labels != counted.ignored]
        weights = torch.tensor(counted.class_weights, dtype=torch.float64, device=labels.device)
        return weights[labels].sum()


def evaluation_outputs(loss: LossNames, settings: Loss) -> EvaluationOutputs:
    """The metrics of an evaluation: the loss, its parts under their own names, labels hit and counted."""
    if loss.outputs:
        return EvaluationOutputs(means={})
    kind = loss_named(settings.type)
    normalizer = kind.normalizer(settings)
    if len(normalizer) > 1:
        names, totals = loss.parts, {"loss": loss.parts}
        means = {part: part for part in loss.parts}
    else:
        means, totals = {"loss": loss.loss, **{part: part for part in loss.parts}}, {}
        names, normalizer = tuple(means), normalizer * len(means)  # what a loss is the sum of are means as it is
    counted = zip(names, normalizer, strict=True) if loss.counted is not None else ()
    return EvaluationOutputs(
        means=means,
        correct=loss.correct,
        counted=loss.counted,
        are_sums=settings.reduction == "sum",
        per_label={name: labels for name, labels in counted if labels is not None},
        totals=totals,
        accuracy=kind.accuracy,
    )


def _own_loss(settings: Loss) -> dict[str, MetricFunction]:
    """A loss outside of the graph, as a metric."""
    function = settings.function
    if function is None:
        return {}

    def loss(outputs: Tensors, batch: Tensors) -> Any:
        value = call_loss(function, outputs, batch)
        return value if settings.reduction == "mean" else (value, len(next(iter(batch.values()))))

    return {"loss": loss}


def _read_evaluation_graph(parameters: Parameters, path: Path, assembly: Assembly) -> TrainingGraph:
    """Reads a separate evaluation graph; its weights must be weights of the trained model, by name and shape.

    Raises:
        ParametersError: some are not, with their names.
    """
    sizes = parameters.distributed
    if sizes.horizontal_parallel_size * sizes.pipeline_parallel_size > 1 or sizes.zero_stage:
        raise ParametersError(
            "paths.eval_model_path: a separate evaluation model needs every full weight on each process; leave it "
            "out, or train without horizontal_parallel_size, pipeline_parallel_size and zero_stage."
        )
    graph = read_training_graph(parameters, path, choose=False)
    net = assembly.networks[0].net
    shapes = {name: tuple(tensor.shape) for name, tensor in net.tensors_by_name().items()}
    initializers = graph.model.graph.initializers
    wrong = [
        name
        for name in sorted({*graph.weights, *graph.states})
        if shapes.get(name) != tuple(initializers[name].const_value.shape)  # type: ignore[union-attr]
    ]
    if wrong:
        raise ParametersError(
            f"paths.eval_model_path: {len(wrong)} of the weights of {str(path)!r} are not in the trained model, or not "
            f"with that shape: {shortened(map(repr, wrong), 5)}. Both graphs must name their weights alike."
        )
    return graph


@torch.no_grad()
def _evaluate(
    state: TrainState,
    forward: Forward | PipelinedForward,
    outputs: EvaluationOutputs,
    further: Sequence[Metric],
    own: FunctionMetrics,
    batches: Iterable[Batch],
    reduction: GradientReduction | None,
) -> tuple[dict[str, float], int]:
    """EvaluateStep over an entire test set: what one batch of all its samples would give, and their number.

    A mean over labels is weighted by the labels that count, whatever batch they are in; accuracy is labels that were
    hit over all that count. With `reduction` every replica has a part of the test set.
    """
    was_training = state.networks[0].net.training
    state.train(False)
    sums, gathered = _Sums(outputs, state.device), MetricSums(further, state.device)
    try:
        for batch, counts in _in_step(batches, reduction):
            features = _read(forward, batch)
            values = forward(features)
            if counts:
                if own.names or further:
                    features = features_on(state.device, batch.features, features)
                own.add(features, values, batch.sample_count)
                sums.add(features, values, batch.sample_count)
                gathered.add(features, values)
    finally:
        state.train(was_training)
    metrics, samples = sums.metrics(reduction)
    group = None if reduction is None else reduction.mesh.replicas
    return ({**own.compute(reduction), **metrics, **gathered.compute(group)} if samples else metrics), samples


def _read(forward: Forward | PipelinedForward, batch: Batch) -> dict[str, torch.Tensor]:
    try:
        return forward.reader.to_tensors(batch.features, batch.origin)
    except DataError as error:
        error.add_note("It is in the test data.")
        raise


def _in_step(batches: Iterable[Batch], reduction: GradientReduction | None) -> Iterator[tuple[Batch, bool]]:
    """Batches, and whether they count: as many on every replica, since weights may be gathered in every pass."""
    if reduction is None or reduction.mesh.replicas is None:
        yield from ((batch, True) for batch in batches)
        return
    source, last = iter(batches), None
    while True:
        batch = next(source, None)
        going_on = torch.tensor(float(batch is not None), device=reduction.mesh.device)
        if not float(reduction.sum_over_replicas(going_on)):
            return
        if batch is not None:
            last = batch
        assert last is not None, "every replica has at least one sample"
        mesh = reduction.mesh
        yield last, batch is not None and mesh.topology.context(mesh.place) == 0


class _Sums:
    """What a pass over a test set adds up."""

    def __init__(self, outputs: EvaluationOutputs, device: torch.device) -> None:
        self.outputs = outputs
        self.zero = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = dict.fromkeys(outputs.means, self.zero)
        self.shares = dict.fromkeys(outputs.means, self.zero)
        self.correct = self.counted = torch.zeros((), dtype=torch.int64, device=device)
        self.samples = 0

    def add(self, features: Mapping[str, Any], values: Mapping[str, Any], samples: int) -> None:
        """Counts one batch."""
        outputs = self.outputs
        for metric, name in outputs.means.items():
            value = values[name].double()
            share = outputs.share(metric, features, values, samples)
            self.shares[metric] = self.shares[metric] + (samples if outputs.are_sums else share)
            # The mean over no label is NaN, and is to count for nothing.
            weighed = value if outputs.are_sums else torch.where(self.zero + share == 0, self.zero, value * share)
            self.sums[metric] = self.sums[metric] + weighed
        if outputs.correct is not None and outputs.counted is not None:
            self.correct = self.correct + values[outputs.correct]
            self.counted = self.counted + values[outputs.counted]
        self.samples += samples

    def metrics(self, reduction: GradientReduction | None) -> tuple[dict[str, float], int]:
        """Means over all that was counted, and the number of samples."""
        parts = [*self.sums.values(), *self.shares.values(), self.correct, self.counted, self.zero + self.samples]
        numbers = torch.stack([part.double() for part in parts])
        if reduction is not None:
            numbers = reduction.sum_over_replicas(numbers)
        *values, correct, counted, samples = numbers.tolist()
        if not samples:
            return {}, 0
        pairs = zip(self.sums, values[: len(self.sums)], values[len(self.sums) :], strict=True)
        means = {metric: total / share if share else math.nan for metric, total, share in pairs}
        totals = {metric: sum(means[part] for part in parts) for metric, parts in self.outputs.totals.items()}
        accuracy = {self.outputs.accuracy: correct / counted} if counted else {}
        return {**totals, **means, **accuracy}, int(samples)
