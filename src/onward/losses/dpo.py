"""Direct preference optimization (Rafailov et al., 2023): prefers the chosen answer, and stays near a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.errors import ModelError
from onward.losses.classes import class_rows, label_rows, logits_before
from onward.losses.kind import LossKind
from onward.losses.labels import LabelRange

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter
    from onward.parameters import Loss, Parameters

REFERENCE = "reference_log_probabilities"
"""Name of the value that the reference computes, after the prefix of losses."""

_IGNORED = -100
_OLDEST_OPSET = 12


def _add(writer: LossWriter) -> LossNames:
    spec = writer.spec
    prediction = writer.prediction(rank=3)
    if writer.opset < _OLDEST_OPSET:
        raise ModelError(
            f"loss.type 'dpo' needs opset {_OLDEST_OPSET} or newer, and the model has {writer.opset}. Convert it with "
            "onnx.version_converter, or export it again."
        )
    axis = -1 if prediction.shape is None else 2
    logits = logits_before(writer, prediction, axis)
    writer.compute_like(logits)
    reference_logits = None if spec.reference_log_probabilities else writer.reference_logits(logits, axis)
    pairs = writer.merge_pairs()
    labels = writer.class_labels("label", [pairs, 2, writer.dimension("label_length")])
    policy = _log_probabilities(writer, logits, labels, "log_probabilities")
    if reference_logits is None:
        reference = writer.computed(writer.number_labels("reference_log_probabilities", [pairs, 2]))
    else:
        reference = _log_probabilities(writer, reference_logits, labels, REFERENCE)
    gained = writer.apply("Sub", policy, reference, name="log_ratios")
    rewards = writer.apply("Mul", gained, writer.number(spec.dpo_beta, "beta"), name="rewards")
    index = [writer.constant(place, name) for place, name in ((0, "chosen"), (1, "rejected"))]
    chosen, rejected = (writer.apply("Gather", rewards, one, axis=1) for one in index)
    margin = writer.apply("Sub", chosen, rejected, name="margins")
    cost = writer.apply("Softplus", writer.apply("Neg", margin))
    if spec.label_smoothing:
        flipped = writer.apply("Mul", writer.apply("Softplus", margin), writer.number(spec.label_smoothing, "share"))
        kept = writer.apply("Mul", cost, writer.number(1 - spec.label_smoothing, "kept_share"))
        cost = writer.apply("Add", kept, flipped)
    parts = {"chosen_reward": chosen, "rejected_reward": rejected}
    return writer.finish(
        writer.reduced(cost, "preference"),
        parts={name: writer.reduced(value) for name, value in parts.items()},
        counts=_count_preferred(writer, margin),
    )


def _log_probabilities(writer: LossWriter, logits: ir.Value, labels: ir.Value, name: str) -> ir.Value:
    """The logarithm of the probability of both answers of each pair, [pairs, 2]: the sum over their tokens."""
    rows = class_rows(writer, writer.computed(logits), -1 if logits.shape is None else 2)
    flat = label_rows(writer, labels, rows)
    ignored = _ignored(writer.spec)
    costs = writer.apply("SoftmaxCrossEntropyLoss", rows.logits, flat, ignore_index=ignored, reduction="none")
    of_tokens = writer.reshape(costs, writer.apply("Shape", labels), name="costs_of_tokens")
    return writer.apply("Neg", writer.sum_over(of_tokens, 2), name=name)


def _count_preferred(writer: LossWriter, margin: ir.Value) -> tuple[ir.Value, ...]:
    if not writer.count_correct:
        return ()
    zero = writer.number(0.0, "zero")
    preferred = writer.apply("Greater", margin, zero)
    every = writer.apply("Or", preferred, writer.apply("Not", preferred))
    return writer.count(preferred, "correct"), writer.count(every, "counted")


def _ignored(loss: Loss) -> int:
    return _IGNORED if loss.ignore_index is None else loss.ignore_index


def _find_problems(parameters: Parameters) -> list[str]:
    loss = parameters.loss
    problems = []
    if loss.reference_model_path is not None and loss.reference_log_probabilities is not None:
        problems.append(
            "loss.reference_model_path and loss.reference_log_probabilities are two references; remove one of them."
        )
    if loss.reference_model_path is not None and loss.reference_model_path in parameters.model_files:
        problems.append(
            "loss.reference_model_path is the trained model itself; remove it: a frozen copy is the reference then, "
            "which shares the weights that do not train."
        )
    return problems


def _label_range(loss: Loss, label: str, classes: int) -> LabelRange:
    return LabelRange(classes, _ignored(loss))


DPO = LossKind(
    name="dpo",
    add=_add,
    remark="direct preference optimization, of pairs of a chosen and a rejected answer",
    reads=("ignore_index", "label_smoothing", "dpo_beta", "reference_model_path", "reference_log_probabilities"),
    find_problems=_find_problems,
    label_range=_label_range,
    accuracy="preference_accuracy",
    is_of_pairs=True,
    label_text="int64 [2, length]: the tokens of the chosen answer and of the rejected one, -100 elsewhere",
)
