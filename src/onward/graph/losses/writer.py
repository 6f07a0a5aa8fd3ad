"""What losses are written with: the values they compare, their labels, and the outputs they become.

A loss is computed in float32, or in float64 for predictions in float64, whatever else the model computes in.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.losses.frozen_model import FrozenModel
from onward.graph.losses.logits import LossInput, for_binary_cross_entropy, for_cross_entropy
from onward.graph.losses.preference import PAIRS, frozen_copy, merge_pairs
from onward.graph.losses.spec import LossNames, LossSpec
from onward.graph.losses.user_graph import merge_loss_graph
from onward.graph.losses.values import (
    FLOAT_TYPES,
    INTEGER_TYPES,
    SMALLEST,
    Dimension,
    add_label,
    clip_to_positive,
    computing_type,
    find_prediction,
    publish,
    to_computing_type,
)
from onward.graph.nodes.node_writer import NodeWriter
from onward.losses.classes import describe_shape, known_size

PREFIX = "loss/"
"""What the names of all nodes and initializers of a loss begin with."""

_MEANING = {"prediction": "output of the model that is compared", "label": "feature of the data to compare it with"}
_NUMBERS = FLOAT_TYPES | INTEGER_TYPES | {ir.DataType.BOOL}


class LossWriter(NodeWriter):
    """Writes one loss into a model.

    Attributes:
        spec: what is asked for.
        count_correct: whether to count the labels that the prediction hits, too.
        dtype: what the loss is computed in.
        classes: labels that are classes -> how many there are.
    """

    smallest = SMALLEST

    def __init__(self, model: ir.Model, spec: LossSpec, count_correct: bool) -> None:
        super().__init__(model, PREFIX)
        self.spec = spec
        self.count_correct = count_correct
        self.dtype = ir.DataType.FLOAT
        self.classes: dict[str, int] = {}
        self._labels: list[str] = []
        self._sources: list[LossInput] = []

    def required(self, field: str) -> str:
        """A field of the section that names an output or a feature.

        Raises:
            ModelError: it is missing.
        """
        name: str | None = getattr(self.spec, field)
        if not name and field in _MEANING:
            raise ModelError(
                f"loss.type is {self.spec.type!r}, but loss.{field} is missing; it names the {_MEANING[field]}."
            )
        return name or ""

    def prediction(self, field: str = "prediction", rank: int | None = None) -> ir.Value:
        """The value of the model that a field names; raises as `find_prediction`."""
        return find_prediction(self, self.required(field), field, rank)

    def before_softmax(self, prediction: ir.Value, class_axis: int, loss: str, after_sigmoid: str) -> ir.Value:
        """What a softmax over the classes is to be computed from; `loss` and `after_sigmoid` are for messages."""
        self._sources.append(for_cross_entropy(self, prediction, class_axis, loss, after_sigmoid))
        return self._sources[-1].value

    def before_sigmoid(self, prediction: ir.Value) -> LossInput:
        """What a binary cross entropy is to be computed from: logits wherever the model has them."""
        self._sources.append(for_binary_cross_entropy(self, prediction, self.spec.from_logits))
        return self._sources[-1]

    def class_axis(self, logits: ir.Value) -> int:
        """The axis of the classes counted from the front; -1 where the rank is unknown and the last is meant."""
        axis = self.spec.class_axis
        if logits.shape is None:
            if axis != -1:
                raise ModelError(
                    f"loss.class_axis is {axis}, but the rank of {logits.name!r} is unknown; use -1, the last."
                )
            return -1
        rank = len(logits.shape)
        if not -rank <= axis < rank:
            raise ModelError(
                f"loss.class_axis is {axis}, but {logits.name!r} has {rank} axes {describe_shape(logits)}; "
                f"expected {-rank} to {rank - 1}."
            )
        return axis % rank

    def check_class_weights(self, logits: ir.Value, axis: int) -> None:
        """Checks that there is a weight for each class, where the model fixes how many there are."""
        weights, classes = self.spec.class_weights, known_size(logits, axis)
        if weights is not None and classes is not None and len(weights) != classes:
            raise ModelError(
                f"loss.class_weights has {len(weights)} numbers, but {logits.name!r} {describe_shape(logits)} has "
                f"{classes} classes on axis {axis}; give one weight a class."
            )

    def class_weights(self, trailing_axes: int = 0) -> ir.Value | None:
        """The weights of the classes as a constant, axes of size 1 behind them; None where there are none."""
        if self.spec.class_weights is None:
            return None
        shaped = np.asarray(self.spec.class_weights).reshape(-1, *[1] * trailing_axes)
        return self.constant(shaped, "class_weights", self.dtype.numpy())

    def class_labels(self, field: str, shape: Iterable[Dimension] | None) -> ir.Value:
        """The label input that a field names, of whole numbers."""
        return self._label(field, shape, ir.DataType.INT64, INTEGER_TYPES, None)

    def number_labels(self, field: str, shape: Iterable[Dimension] | None) -> ir.Value:
        """The label input that a field names, of floats."""
        return self._label(field, shape, self.dtype, FLOAT_TYPES, None)

    def _label(
        self,
        field: str,
        shape: Iterable[Dimension] | None,
        dtype: ir.DataType,
        types: Collection[ir.DataType],
        allowed: Collection[ir.DataType] | None,
    ) -> ir.Value:
        """Adds an input or finds it; `types`: what `loss.label_type` may be, `allowed`: what an input may have."""
        if field == "label":
            dtype = self._label_type(dtype, types)
        label = add_label(self, self.required(field), dtype, shape, allowed)
        self._labels.append(str(label.name))
        return label

    def _label_type(self, default: ir.DataType, types: Collection[ir.DataType]) -> ir.DataType:
        """The element type of the label input to add."""
        asked = self.spec.label_type
        if asked is None:
            return default
        found = next((t for t in ir.DataType if t.name.lower() == asked.lower()), None)
        found = {"float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}.get(asked.lower(), found)
        if found is None or found not in types:
            listed = ", ".join(sorted(t.name.lower() for t in types))
            raise ModelError(f"loss.label_type is {asked!r}; this loss takes {listed}.")
        return found

    def compared(self, prediction: ir.Value) -> tuple[ir.Value, ir.Value]:
        """A prediction and the label, number by number, in the type that the loss is computed in."""
        if self.spec.class_weights is not None or self.spec.ignore_index is not None:
            raise ModelError(
                f"loss.class_weights and loss.ignore_index do not belong to {self.spec.type}; remove them."
            )
        self.compute_like(prediction)
        labels = self._label("label", prediction.shape, self.dtype, _NUMBERS, _NUMBERS)
        return self.computed(prediction), self.like(self.computed(labels), prediction)

    def compute_like(self, prediction: ir.Value) -> None:
        """From now on computes in the type that losses of such a prediction have."""
        self.dtype = computing_type(prediction)

    def computed(self, value: ir.Value) -> ir.Value:
        """A value in the type that the loss is computed in."""
        return to_computing_type(self, value, self.dtype)

    def integers(self, value: ir.Value) -> ir.Value:
        """A value as int64."""
        return to_computing_type(self, value, ir.DataType.INT64)

    def as_indices(self, labels: ir.Value) -> ir.Value:
        """Labels as int64 (int32 stays, where the operators take it)."""
        is_taken = labels.dtype in (ir.DataType.INT64, ir.DataType.INT32) and self.opset >= 12
        return labels if is_taken else self.integers(labels)

    def floats(self, flags: ir.Value) -> ir.Value:
        """Flags as 0 and 1 in the type that the loss is computed in."""
        return self.cast(flags, self.dtype)

    def like(self, labels: ir.Value, prediction: ir.Value) -> ir.Value:
        """Labels in the shape of the prediction, so that `[B]` against `[B, 1]` does not broadcast to `[B, B]`."""
        shaped = self.reshape(labels, self.apply("Shape", prediction), name="label_like_prediction")
        shaped.shape, shaped.type = prediction.shape, labels.type
        return shaped

    def clip_to_positive(self, value: ir.Value) -> ir.Value:
        """At least the smallest normal float, so that its logarithm and the gradient of that are finite."""
        return clip_to_positive(self, value, self.dtype)

    def number(self, number: float, name: str) -> ir.Value:
        """A constant in the type that the loss is computed in."""
        return self.constant(number, name, self.dtype.numpy())

    def merge_pairs(self) -> ir.SymbolicDim:
        """Makes every input one of pairs, and the model compute both samples of each; the size of the pairs' axis."""
        merge_pairs(self)
        return self.dimension(PAIRS)

    def reference_logits(self, logits: ir.Value, axis: int) -> ir.Value:
        """What the reference computes for logits: the model of a file, else this one as it is when the run starts.

        Raises:
            ModelError: the file cannot be merged, or a copy cannot be made, or the reference has other classes.
        """
        path = self.spec.reference_model_path
        if path is None:
            copy = frozen_copy(self, logits)
            self.describe(copy, logits, None if logits.shape is None else list(logits.shape))
            return copy
        field, self.prefix = "loss.reference_model_path", f"{PREFIX}reference/"
        merged = FrozenModel(self, Path(path), field, (), None, self.spec.limits)
        self._labels.extend(merged.labels)
        name = merged.output_like(str(self.spec.prediction), "Rename the output that corresponds to it.")
        found = for_cross_entropy(self, merged.value(name, field), axis, self.spec.type, "For this loss set").value
        self.prefix = PREFIX
        classes = known_size(logits, axis), known_size(found, axis)
        if None not in classes and classes[0] != classes[1]:
            raise ModelError(
                f"{field} {str(path)!r} has {classes[1]:,} classes and the model {classes[0]:,}; give a reference of "
                "the same tokens."
            )
        return found

    def dimension(self, name: str) -> ir.SymbolicDim:
        """A size that batches may choose."""
        return ir.SymbolicDim(name)

    def describe(self, value: ir.Value, like: ir.Value, shape: Sequence[Dimension] | None) -> None:
        """Sets the shape of a value, and its type to another's."""
        value.shape, value.type = None if shape is None else ir.Shape(shape), like.type

    def reduced(self, value: ir.Value, name: str = "") -> ir.Value:
        """The mean or sum of all elements, as `loss.reduction` says."""
        return self.reduce_all(value, self.spec.reduction, name=name)

    def count(self, flags: ir.Value, name: str) -> ir.Value:
        """How many flags are true: int64 of rank 0."""
        return self.reduce_all(self.cast(flags, ir.DataType.INT64), "sum", name=name)

    def is_a_loss(self, value: ir.Value) -> bool:
        """Whether a value is float32 of rank 0."""
        return value.dtype is ir.DataType.FLOAT and value.shape is not None and len(value.shape) == 0

    def keep(self, loss: ir.Value) -> LossNames:
        """A value of the model that is the loss as it is."""
        return LossNames(loss=str(loss.name) if loss.is_graph_output() else publish(self, loss, str(loss.name)))

    def merge_model(self, path: str | os.PathLike[str]) -> tuple[ir.Value, Mapping[str, ir.Value]]:
        """The loss and the other outputs of the user's loss model; raises as `merge_loss_graph`."""
        spec = self.spec
        merged = merge_loss_graph(self, path, spec.graph_inputs, spec.graph_output, spec.limits)
        self._labels.extend(merged.labels)
        return merged.loss, merged.parts

    def finish(
        self,
        loss: ir.Value,
        *,
        name: str = "loss",
        parts: Mapping[str, ir.Value] | None = None,
        outputs: Mapping[str, ir.Value] | None = None,
        counts: Sequence[ir.Value] = (),
    ) -> LossNames:
        """Names what was computed and makes it outputs of the graph.

        Args:
            loss: of rank 0.
            name: of the loss.
            parts: what it is the sum of, of rank 0.
            outputs: further values, of whatever shape and type.
            counts: labels that were hit, and all that count; empty: none are counted.
        """
        loss_name = publish(self, loss, name, self.dtype)
        part_names = [publish(self, value, part, self.dtype) for part, value in (parts or {}).items()]
        counted = [publish(self, value, str(value.name), ir.DataType.INT64) for value in counts]
        part_names += [publish(self, value, output) for output, value in (outputs or {}).items()]
        correct, count = counted or (None, None)
        return LossNames(
            loss=loss_name,
            parts=tuple(part_names),
            labels=tuple(self._labels),
            constants=tuple(self.constants),
            correct=correct,
            counted=count,
            classes=self.classes,
            notes=tuple(note for source in self._sources for note in source.notes),
            holds_probabilities=len(self._sources) == 1 and self._sources[0].holds_probabilities,
        )
