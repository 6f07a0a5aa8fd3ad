"""The losses of distillation: soft targets of a teacher, and values of the student like those of the teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.classical.side_outputs import WhyNotLowered
from onward.graph.losses.frozen_model import FrozenModel
from onward.graph.losses.spec import LossNames, LossSpec
from onward.graph.losses.values import FLOAT_TYPES, infer_type_and_shape, publish
from onward.graph.losses.writer import LossWriter
from onward.losses.classes import class_rows, describe_shape, label_rows, logits_before
from onward.losses.label_smoothing import weights_of_labels
from onward.parameters.distillation import Distillation
from onward.spelling import did_you_mean

PREFIX = "teacher/"
"""What the names of a teacher's values, and of everything computed from them, begin with."""
PROJECTION = "distillation.projection/"
"""What the names of projections begin with."""


def is_projection(name: str) -> bool:
    """Whether a weight is a projection, which the exported model does not contain."""
    return name.startswith(PROJECTION)


def distill(
    model: ir.Model,
    loss: LossSpec,
    names: LossNames,
    asked: Distillation,
    why_not_lowered: WhyNotLowered | None = None,
    seed: int = 0,
) -> LossNames:
    """Merges a teacher into a model that has its loss, in place, and adds what the student learns from it to the loss.

    Args:
        model: the student, prepared for lowering.
        loss: how the labels are compared.
        names: of the loss that it has.
        asked: section `distillation`, with a teacher.
        why_not_lowered: asked for every operator of the teacher.
        seed: of what projections begin as.

    Returns:
        The names of the loss that is minimized then; its parts are `label_loss`, `soft_loss` and `pairs_loss`.

    Raises:
        ModelError: the teacher cannot be read or merged, or values that are to be compared do not fit.
    """
    assert asked.teacher_path is not None
    writer = LossWriter(model, loss, False)
    writer.prefix = PREFIX
    students = {student: _student_value(model.graph, student) for student in asked.pairs}
    field, named = "distillation.teacher_path", tuple(asked.pairs.values())
    teacher = FrozenModel(writer, asked.teacher_path, field, named, why_not_lowered, loss.limits)
    frozen, parameters = len(writer.constants), _elements(model.graph, writer.constants)
    total = next(value for value in model.graph.outputs if value.name == names.loss)
    total.name = writer.unique("label_loss")
    parts, label_loss, addends, projections = {str(total.name): total}, total, list[str](), list[str]()
    if asked.alpha > 0:
        total = writer.apply("Mul", label_loss, writer.constant(1 - asked.alpha, "label_share", "f"))
        parts["soft_loss"] = soft = _soft_loss(writer, teacher, asked)
        scaled = writer.apply("Mul", soft, writer.constant(asked.alpha * asked.temperature**2, "soft_share", "f"))
        total = writer.apply("Add", total, scaled)
    if asked.pairs:
        pairs, projections = _pairs_loss(writer, teacher, students, asked.pairs, seed)
        parts["pairs_loss"] = pairs
        scaled = writer.apply("Mul", pairs, writer.constant(asked.pairs_weight, "pairs_weight", "f"))
        addends = [
            str(one.name) if one is label_loss else publish(writer, one, "addend", ir.DataType.FLOAT)
            for one in (total, scaled)
        ]
        total = writer.apply("Add", total, scaled)
    published = [
        publish(writer, value, name, ir.DataType.FLOAT) for name, value in parts.items() if value is not label_loss
    ]
    note = (
        f"distillation: the teacher {asked.teacher_path.name!r} with {parameters:,} parameters in {frozen} tensors is "
        "computed in every step, without gradient; the exported model is the student alone."
    )
    return dataclasses.replace(
        names,
        loss=publish(writer, total, "distilled_loss", ir.DataType.FLOAT),
        parts=(*names.parts, str(label_loss.name), *published),
        addends=tuple(addends),
        labels=tuple(dict.fromkeys((*names.labels, *teacher.labels))),
        constants=(*names.constants, *(name for name in writer.constants if name not in projections)),
        projections=tuple(projections),
        notes=(*names.notes, note),
    )


def _elements(graph: ir.Graph, constants: list[str]) -> int:
    stored = (graph.initializers[name].const_value for name in constants)
    return sum(tensor.size for tensor in stored if tensor is not None and tensor.dtype in FLOAT_TYPES)


def _student_value(graph: ir.Graph, name: str) -> ir.Value:
    known = {str(one.name): one for node in graph for one in node.outputs}
    if name not in known:
        raise ModelError(
            f"distillation.pairs names {name!r}, which is no value of the trained model."
            f"{did_you_mean(name, known)} `onward inspect` lists its nodes."
        )
    return known[name]


def _soft_loss(writer: LossWriter, teacher: FrozenModel, asked: Distillation) -> ir.Value:
    """The Kullback-Leibler divergence of softened class probabilities, a mean as the label loss is one."""
    spec, prediction = writer.spec, writer.prediction()
    axis = writer.class_axis(prediction)
    name = asked.teacher_logits or teacher.output_like(str(spec.prediction), "Set distillation.teacher_logits to one.")
    found = teacher.value(name, "distillation.teacher_logits")
    _check_shapes(prediction, found, f"loss.prediction {spec.prediction!r} of the student", "the teacher's logits")
    logits = {"student": logits_before(writer, prediction, axis), "teacher": logits_before(writer, found, axis)}
    writer.compute_like(logits["student"])
    scale = writer.number(1 / asked.temperature, "inverse_temperature")
    rows = {}
    softened = {}
    for who, value in logits.items():
        # Before opset 13, LogSoftmax flattens everything from its axis on.
        rows[who] = class_rows(writer, writer.computed(value), axis, flat_before_opset=13)
        scaled = writer.apply("Mul", rows[who].logits, scale)
        softened[who] = writer.apply("LogSoftmax", scaled, axis=1, name=f"log_probabilities_of_{who}")
    difference = writer.apply("Sub", softened["teacher"], softened["student"])
    weighed = writer.apply("Mul", writer.apply("Exp", softened["teacher"], name="probabilities"), difference)
    per_row = writer.sum_over(weighed, 1, name="divergence_of_rows")
    share = None
    if not spec.dense_labels:
        label = next(value for value in writer.graph.inputs if value.name == spec.label)
        flat = writer.integers(label_rows(writer, label, rows["student"]))
        counted = None
        if spec.ignore_index is not None:
            ignored = writer.apply("Equal", flat, writer.constant(spec.ignore_index, "ignore_index"))
            counted = writer.apply("Not", ignored)
        share = weights_of_labels(writer, flat, counted, writer.class_weights())
    if share is None:
        return _in_float32(writer, writer.reduced(per_row, "soft_loss"))
    summed = writer.reduce_all(writer.apply("Mul", per_row, share), "sum")
    if spec.reduction == "mean":
        summed = writer.apply("Div", summed, writer.reduce_all(share, "sum"), name="soft_loss")
    return _in_float32(writer, summed)


def _pairs_loss(
    writer: LossWriter, teacher: FrozenModel, students: Mapping[str, ir.Value], pairs: Mapping[str, str], seed: int
) -> tuple[ir.Value, list[str]]:
    """The sum of the mean (or, as `loss.reduction` says, summed) squared differences, and the projections in it."""
    total: ir.Value | None = None
    projections = list[str]()
    for student, name in pairs.items():
        own, other = students[student], teacher.value(name, f"distillation.pairs[{student!r}]")
        for value in (own, other):
            if value.dtype is None or value.shape is None:
                infer_type_and_shape(writer.model, value)
        axis = _differing_axis(own, other)
        if axis is None:
            _check_shapes(own, other, f"distillation.pairs: {student!r} of the student", f"{name!r} of the teacher")
        writer.compute_like(own)
        compared = writer.computed(own), writer.computed(other)
        if axis is not None:
            compared, projection = _projected(writer, student, compared, axis, seed)
            projections.append(projection)
        difference = writer.apply("Sub", *compared, name="difference")
        error = _in_float32(writer, writer.reduced(writer.apply("Mul", difference, difference), "squared_error"))
        total = error if total is None else writer.apply("Add", total, error)
    assert total is not None
    return total, projections


def _differing_axis(own: ir.Value, other: ir.Value) -> int | None:
    """The one axis in which two shapes differ: that of the features, which a projection maps to each other."""
    if own.shape is None or other.shape is None or len(own.shape) != len(other.shape):
        return None
    sizes = enumerate(zip(own.shape, other.shape, strict=True))
    found = [axis for axis, (a, b) in sizes if isinstance(a, int) and isinstance(b, int) and a != b]
    return found[0] if len(found) == 1 and found[0] > 0 else None


def _projected(
    writer: LossWriter, student: str, pair: tuple[ir.Value, ir.Value], axis: int, seed: int
) -> tuple[tuple[ir.Value, ir.Value], str]:
    """Both values with the axis last, the student's mapped to the teacher's by a linear layer; the layer's weight."""
    assert pair[0].shape is not None
    assert pair[1].shape is not None
    rank, before, after = len(pair[0].shape), pair[0].shape[axis], pair[1].shape[axis]
    assert isinstance(before, int)
    assert isinstance(after, int)
    order = [*(one for one in range(rank) if one != axis), axis]
    own, other = pair if order == sorted(order) else (writer.apply("Transpose", one, perm=order) for one in pair)
    draw = np.random.default_rng([seed, *student.encode()]).uniform(-1, 1, (before, after))
    writer.prefix = ""
    weight = writer.constant(draw / before**0.5, f"{PROJECTION}{student}", writer.dtype.numpy())
    writer.prefix = PREFIX
    return (writer.apply("MatMul", own, weight, name=f"projected_{student}"), other), str(weight.name)


def _in_float32(writer: LossWriter, value: ir.Value) -> ir.Value:
    return value if writer.dtype is ir.DataType.FLOAT else writer.cast(value, ir.DataType.FLOAT)


def _check_shapes(own: ir.Value, other: ir.Value, one: str, another: str) -> None:
    if own.shape is None or other.shape is None:
        return
    sizes = list(zip(own.shape, other.shape, strict=False))
    clash = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in sizes)
    if clash or len(own.shape) != len(other.shape):
        raise ModelError(
            f"{one} is {describe_shape(own)}, but {another} {describe_shape(other)}. Choose values whose shapes are "
            "the same, or differ in one axis, for which a projection is learned."
        )
