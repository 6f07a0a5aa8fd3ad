"""The CTC loss: one operator of onward's own for the loss and one for decoding, since ONNX has neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward.errors import ModelError
from onward.losses.classes import describe_shape, known_size
from onward.losses.kind import LossKind
from onward.losses.labels import LabelRange

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter
    from onward.parameters import Loss, Parameters

_DOMAIN = "onward.fused"
_BLANK = 0
_PADDING = -1


@dataclass(frozen=True)
class _Axes:
    """Which axis of a prediction is which; counted from the front."""

    batch: int
    time: int
    classes: int


def _add(writer: LossWriter) -> LossNames:
    spec, prediction = writer.spec, writer.prediction()
    axes = _find_axes(writer, prediction)
    _check_blank(prediction, axes, spec.blank)
    class_axis = axes.classes if prediction.shape is not None else -1
    source = writer.before_softmax(prediction, class_axis, "ctc", "Set")
    writer.compute_like(source)
    batch = None if prediction.shape is None else prediction.shape[axes.batch]
    labels = writer.class_labels("label", [batch, writer.dimension("label_length")])
    lengths = [writer.class_labels("prediction_lengths", [batch])] if spec.prediction_lengths else []
    classes = known_size(prediction, axes.classes)
    if classes is not None:
        writer.classes[str(labels.name)] = classes
    inputs, blank_and_padding = [writer.computed(source), labels, *lengths], _blank_and_padding(spec)
    given = dict(zip(("blank", "ignore_index"), blank_and_padding, strict=True))
    given |= {"class_axis": axes.classes, "time_axis": axes.time}
    ends = {"reduction": spec.reduction, "zero_infinity": int(spec.zero_infinity is not False)}
    loss = writer.apply_own(_DOMAIN, "CTCLoss", *inputs, name="ctc", **ends, **given)
    if not writer.count_correct:
        return writer.finish(loss)
    correct = writer.apply_own(_DOMAIN, "CTCGreedyMatches", *inputs, name="correct", **given)
    shape = writer.apply("Shape", labels)
    counted = writer.squeeze(writer.apply("Gather", shape, writer.constant([0], "axis"), axis=0), 0)
    counted.name = writer.unique(f"{writer.prefix}counted")
    return writer.finish(loss, counts=(correct, counted))


def _blank_and_padding(loss: Loss) -> tuple[int, int]:
    padding = _PADDING if loss.ignore_index is None else loss.ignore_index
    return _BLANK if loss.blank is None else loss.blank, padding


def _find_axes(writer: LossWriter, prediction: ir.Value) -> _Axes:
    """The axes of a prediction of three.

    Without `time_axis`, of the two axes that are not the classes the batch is the one with the size, or the name of
    the size, that the model's inputs have first; if both or neither are, it is the first.

    Raises:
        ModelError: the prediction has not three axes, or an axis is out of range or named twice.
    """
    shape, class_axis, time_axis = prediction.shape, writer.spec.class_axis, writer.spec.time_axis
    if shape is not None and len(shape) != 3:
        raise ModelError(
            f"loss.prediction: {prediction.name!r} is {describe_shape(prediction)}; the CTC loss expects three axes, "
            "as [batch, time, classes]. Name an output, or a value in the model, that has them."
        )
    for field, axis in (("class_axis", class_axis), ("time_axis", time_axis)):
        if axis is not None and not -3 <= axis < 3:
            raise ModelError(
                f"loss.{field} is {axis}, but {prediction.name!r} has three axes for the CTC loss; expected -3 to 2."
            )
    classes = class_axis % 3
    first, second = (axis for axis in range(3) if axis != classes)
    if time_axis is not None:
        if time_axis % 3 == classes:
            raise ModelError(f"loss.time_axis and loss.class_axis are both axis {classes}; give two different axes.")
        return _Axes(3 - classes - time_axis % 3, time_axis % 3, classes)
    batches = {_size(value.shape[0]) for value in writer.graph.inputs if not value.is_initializer() and value.shape} - {
        None
    }
    is_batch = [shape is not None and _size(shape[axis]) in batches for axis in (first, second)]
    return _Axes(second, first, classes) if is_batch == [False, True] else _Axes(first, second, classes)


def _check_blank(prediction: ir.Value, axes: _Axes, blank: int | None) -> None:
    """Checks that the blank is a class, where the model fixes how many there are.

    Raises:
        ModelError: it is none.
    """
    classes = known_size(prediction, axes.classes)
    if blank is not None and (blank < 0 or (classes is not None and blank >= classes)):
        expected = "0 or more" if classes is None else f"0 to {classes - 1}"
        raise ModelError(
            f"loss.blank is {blank}, but {prediction.name!r} {describe_shape(prediction)} has {classes or 'its'} "
            f"classes on axis {axes.classes}; expected {expected}."
        )


def _size(size: int | ir.SymbolicDim) -> int | str | None:
    return size if isinstance(size, int) else size.value


def _find_problems(parameters: Parameters) -> list[str]:
    """A loss that ONNX has no operator for, computed on the host in part: not in files, not in CUDA graphs."""
    paths = parameters.paths
    problems = [
        f"loss.type is 'ctc', for which ONNX has no operator, so that {field} cannot be written; leave it out."
        for field, is_met in {
            "paths.model_with_loss_func_path": paths.model_with_loss_func_path,
            "paths.model_with_training_graph_path": paths.model_with_training_graph_path,
        }.items()
        if is_met
    ]
    if parameters.speed.cuda_graphs:
        problems.append(
            "loss.type is 'ctc', which reads labels on the host in every pass, and speed.cuda_graphs records passes "
            "that do not; set speed.cuda_graphs: false."
        )
    return problems


def _label_range(loss: Loss, label: str, classes: int) -> LabelRange:
    blank, padding = _blank_and_padding(loss)
    return LabelRange(classes, padding, blank)


CTC = LossKind(
    name="ctc",
    add=_add,
    remark="connectionist temporal classification: sequences of labels without positions in time",
    reads=("ignore_index", "blank", "time_axis", "prediction_lengths", "zero_infinity"),
    find_problems=_find_problems,
    label_range=_label_range,
    accuracy="sequence_accuracy",
    has_operators=False,
    is_of_sequences=True,
    label_text="int64 [length], the numbers of the classes in order, -1 at the end of shorter ones; 0 is the blank",
)
