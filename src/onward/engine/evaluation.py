"""EvaluateStep: means over a whole test set, by the trained graph or by a separate one with the same weights."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onward.data.batches import Batch
from onward.data.shard import FeatureSpec
from onward.engine.forward import Forward, LabelRange
from onward.engine.network import Network
from onward.engine.precision import Precision
from onward.engine.preparation import read_training_graph
from onward.engine.state import TrainState
from onward.errors import ParametersError
from onward.graph.loss import LossNames
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import OnnxModule
from onward.parameters import Loss, Parameters


class Evaluator:
    """Evaluates a network as parameters say.

    Args:
        parameters: of the run; a separate evaluation model is read here.
        network: the trained one.
        loss: of its graph.
        precision: of the forward pass.
        label_ranges: features that are class labels -> which there are.

    Raises:
        ModelError: the separate model cannot be read or lowered.
        ParametersError: its weights are not those of the trained one.
    """

    def __init__(
        self,
        parameters: Parameters,
        network: Network,
        loss: LossNames,
        precision: Precision,
        label_ranges: Mapping[str, LabelRange],
    ) -> None:
        separate, path = None, parameters.paths.eval_model_path
        self._outputs = _evaluation_outputs(loss, parameters.loss)
        if path is not None:
            graph = _read_evaluation_graph(parameters, path, network.net)
            assert graph.loss_names is not None
            self._outputs = _evaluation_outputs(graph.loss_names, parameters.loss)
            separate = OnnxModule(graph, self._outputs.names).to(network.net.device)
        self._make_forward = functools.partial(
            Forward, network, self._outputs.names, precision, separate, label_ranges=label_ranges
        )
        self._forward: Forward | None = None

    @property
    def forward(self) -> Forward:
        """The forward pass, made once: lowering a large graph takes longer than a step of it."""
        if self._forward is None:
            self._forward = self._make_forward()
        return self._forward

    def check_specs(self, specs: Mapping[str, FeatureSpec]) -> None:
        """Checks what a test set says of its samples.

        Raises:
            DataError: they do not fit the model.
        """
        self.forward.check_specs(specs)

    def evaluate(self, state: TrainState, batches: Iterable[Batch]) -> tuple[dict[str, float], int]:
        """Metrics over all samples of a test set, each seen once, and the number of samples.

        Raises:
            DataError: the data are broken or do not fit.
        """
        return _evaluate(state, self.forward, self._outputs, batches)


@dataclass(frozen=True)
class EvaluationOutputs:
    """Which values of the evaluation pass become metrics, and what each is a mean over.

    Attributes:
        means: metric name -> value computed for each batch.
        correct, counted: values that count labels, those that were hit and all; None where there are no classes.
        are_sums: the values are sums over the batch; their metric is the sum over the test set by its samples.
        per_label: metrics that are means over the labels that count, not over the samples.
        totals: metric name -> metrics that it is the sum of.
        label: feature with the class labels.
        class_weights: weight of each class in the means over labels; None: all alike.
        ignore_index: label that does not count.
    """

    means: Mapping[str, str]
    correct: str | None = None
    counted: str | None = None
    are_sums: bool = False
    per_label: frozenset[str] = frozenset()
    totals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label: str | None = None
    class_weights: tuple[float, ...] | None = None
    ignore_index: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All values, as the forward pass is to compute them."""
        return (*self.means.values(), *(n for n in (self.correct, self.counted) if n is not None))

    def share(self, metric: str, features: Mapping[str, Any], values: Mapping[str, Any], samples: int) -> Any:
        """What a batch's value weighs in the mean over the test set: what it is itself a mean over."""
        if metric not in self.per_label:
            return samples
        if self.class_weights is None:
            assert self.counted is not None
            return values[self.counted]
        assert self.label is not None
        labels = features[self.label].long()
        if self.ignore_index is not None:
            labels = labels[labels != self.ignore_index]
        weights = torch.tensor(self.class_weights, dtype=torch.float64, device=labels.device)
        return weights[labels].sum()


def _evaluation_outputs(loss: LossNames, parameters: Loss) -> EvaluationOutputs:
    """The metrics of an evaluation: the loss, its parts under their own names, labels hit and counted."""
    has_classes = loss.counted is not None
    if parameters.type == "bert":
        masked_lm, next_sentence = loss.parts
        means = {masked_lm: masked_lm, next_sentence: next_sentence}
        per_label, totals = frozenset({masked_lm}), {"loss": (masked_lm, next_sentence)}
    else:
        means, totals = {"loss": loss.loss, **{part: part for part in loss.parts}}, {}
        per_label = frozenset({"loss"}) if has_classes and not parameters.dense_labels else frozenset[str]()
    ignored = 0 if parameters.type == "bert" and parameters.ignore_index is None else parameters.ignore_index
    return EvaluationOutputs(
        means,
        loss.correct,
        loss.counted,
        are_sums=parameters.reduction == "sum",
        per_label=per_label,
        totals=totals,
        label=parameters.masked_lm_ids if parameters.type == "bert" else parameters.label,
        class_weights=None if parameters.dense_labels else parameters.class_weights,
        ignore_index=ignored,
    )


def _read_evaluation_graph(parameters: Parameters, path: Path, net: OnnxModule) -> TrainingGraph:
    """Reads a separate evaluation graph; its weights must be weights of the trained model, by name and shape.

    Raises:
        ParametersError: some are not, with their names.
    """
    graph = read_training_graph(parameters, path, choose=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in net.tensors_by_name().items()}
    initializers = graph.model.graph.initializers
    wrong = [
        name
        for name in sorted({*graph.weights, *graph.states})
        if shapes.get(name) != tuple(initializers[name].const_value.shape)  # type: ignore[union-attr]
    ]
    if wrong:
        listed = ", ".join(map(repr, wrong[:5])) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise ParametersError(
            f"paths.eval_model_path: {len(wrong)} of the weights of {str(path)!r} are not in the trained model, or not "
            f"with that shape: {listed}. Both graphs must name their weights alike."
        )
    return graph


@torch.no_grad()
def _evaluate(
    state: TrainState, forward: Forward, outputs: EvaluationOutputs, batches: Iterable[Batch]
) -> tuple[dict[str, float], int]:
    """EvaluateStep over a whole test set: what one batch of all its samples would give, and their number.

    A mean over labels is weighted by the labels that count, whatever batch they are in; accuracy is labels that were
    hit over all that count.
    """
    was_training = state.networks[0].net.training
    state.train(False)
    zero = torch.zeros((), dtype=torch.float64, device=state.device)
    sums, shares = dict.fromkeys(outputs.means, zero), dict.fromkeys(outputs.means, zero)
    correct = counted = torch.zeros((), dtype=torch.int64, device=state.device)
    samples = 0
    try:
        for batch in batches:
            features = forward.to_tensors(batch.features)
            values = forward(features)
            for metric, name in outputs.means.items():
                value = values[name].double()
                share = outputs.share(metric, features, values, batch.sample_count)
                shares[metric] = shares[metric] + (batch.sample_count if outputs.are_sums else share)
                # The mean over no label is NaN, and is to count for nothing.
                weighed = value if outputs.are_sums else torch.where(zero + share == 0, zero, value * share)
                sums[metric] = sums[metric] + weighed
            if outputs.correct is not None and outputs.counted is not None:
                correct, counted = correct + values[outputs.correct], counted + values[outputs.counted]
            samples += batch.sample_count
    finally:
        state.train(was_training)
    if not samples:
        return {}, 0
    means = {metric: float(total / shares[metric]) for metric, total in sums.items()}
    totals = {metric: sum(means[part] for part in parts) for metric, parts in outputs.totals.items()}
    accuracy = {"accuracy": int(correct) / int(counted)} if int(counted) else {}
    return {**totals, **means, **accuracy}, samples
