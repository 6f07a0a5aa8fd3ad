"""The section `loss` of RUN.yaml: what training minimizes, and which output and which features it compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from onward.losses import registry
from onward.parameters.field_types import (
    STRICT,
    FiniteNumber,
    Flag,
    NonNegative,
    OneOf,
    Positive,
    Share,
    ShareBelowOne,
    WholeNumber,
)

LossType = Annotated[str, OneOf(lambda: [(kind.name, kind.remark) for kind in registry.LOSSES])]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What training minimizes.

    Attributes:
        type: {names}.
        prediction: the output of the model that is compared; for `output`, the loss itself.
        label: the feature of the data that it is compared with.
        class_axis: axis of the classes in the prediction (softmax_cross_entropy, softmax_focal, dice, ctc).
        ignore_index: label value to ignore (softmax_cross_entropy; softmax_focal; dice; dpo, where it is -100 if
            absent; bert, where it is 0 if absent; ctc, where it pads labels `[batch, length]` at the end and is -1 if
            absent; the blank pads them as well).
        class_weights: one weight per class (softmax_cross_entropy, softmax_focal; bert, for the masked tokens).
        reduction: `mean` or `sum`; a sum is reported per sample, in training and in evaluation.
        from_logits: the prediction is logits, not probabilities (binary_cross_entropy).
        dense_labels: labels are float probabilities in the prediction's shape (softmax_cross_entropy).
        label_smoothing: the share of each label that is spread evenly over all classes (softmax_cross_entropy), or the
            share of pairs whose answers may be the wrong way around (dpo).
        focal_gamma: how much less well-classified elements count, the exponent of 1 - p (focal,
            softmax_focal).
        focal_alpha: weight of label 1, and 1 - focal_alpha that of label 0 (focal); null: both weigh 1.
        dice_smoothing: added to numerator and denominator, so that a class that is in no pixel counts 0 (dice,
            binary_dice).
        dice_background: whether class 0, or channel 0, counts (dice; binary_dice with dice_per_channel).
        dice_per_channel: each channel (axis 1) of a sample is a region; else the sample is one (binary_dice).
        paired_prediction: the output, or another value, of the model whose rows belong to those of the prediction
            (info_nce).
        temperature: similarities are divided by it (info_nce).
        logit_scale: a value of the model, one number, that similarities are multiplied by instead (info_nce).
        normalize_embeddings: whether similarities are cosines, not dot products (info_nce).
        symmetric: whether the loss is the mean of both directions, as CLIP's (info_nce).
        dpo_beta: how strongly the model is held to the reference (dpo).
        reference_model_path: another ONNX model as the reference (dpo), which reads the same inputs and is computed
            without gradient in every step; absent: the reference is the model as the run starts, which a frozen copy
            computes.
        reference_log_probabilities: feature [2] with the logarithm of the probability that the reference gives to each
            answer of a pair (dpo), which `onward reference` adds to shards; absent: the reference is computed.
        label_type: element type of the label in ONNX's spelling ("int32"); absent: int64 for classes, else float.
        blank: class that stands for no label (ctc); absent: 0.
        time_axis: axis of the time steps in the prediction (ctc); absent: of the two axes that are not the classes the
            one that does not have the batch size of the model's inputs, else the second.
        prediction_lengths: feature `[batch]` with the number of time steps of each sample that count (ctc); absent:
            all of them.
        zero_infinity: whether samples with more labels than their time steps can hold count as a loss of 0, with a
            warning, and do not end the run (ctc); absent: true.
        graph: path of an ONNX loss model (type `graph`).
        graph_inputs: input of the loss model -> output of the model or feature of the data.
        graph_output: output of the loss model that is the loss; absent: its only or first one.
        function: a torch function of (outputs, batch) that returns a scalar; both map names to tensors
            (type `function`).
        masked_lm_prediction, next_sentence_prediction: the two outputs of a BERT (type `bert`).
        masked_lm_positions, masked_lm_ids, next_sentence_label: the three features they are compared with.
    """

    __pydantic_config__ = STRICT
    type: LossType
    prediction: str | None = None
    label: str | None = None
    class_axis: WholeNumber = -1
    ignore_index: WholeNumber | None = None
    class_weights: tuple[FiniteNumber, ...] | None = None
    reduction: Literal["mean", "sum"] = "mean"
    from_logits: Flag = False
    dense_labels: Flag = False
    label_smoothing: ShareBelowOne = 0.0
    focal_gamma: NonNegative = 2.0
    focal_alpha: Share | None = 0.25
    dice_smoothing: Positive = 1e-5
    dice_background: Flag = True
    dice_per_channel: Flag = False
    paired_prediction: str | None = None
    temperature: Positive = 0.07
    logit_scale: str | None = None
    normalize_embeddings: Flag = True
    symmetric: Flag = True
    dpo_beta: Positive = 0.1
    reference_model_path: Path | None = None
    reference_log_probabilities: str | None = None
    label_type: str | None = None
    blank: WholeNumber | None = None
    time_axis: WholeNumber | None = None
    prediction_lengths: str | None = None
    zero_infinity: Flag | None = None
    graph: Path | None = None
    graph_inputs: Mapping[str, str] = field(default_factory=dict)
    graph_output: str | None = None
    function: Callable[[Any, Any], Any] | None = None
    masked_lm_prediction: str = "output1"
    next_sentence_prediction: str = "output2"
    masked_lm_positions: str = "masked_lm_positions"
    masked_lm_ids: str = "masked_lm_ids"
    next_sentence_label: str = "next_sentence_labels"
