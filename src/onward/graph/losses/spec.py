"""What a loss is asked to be, and the names of what it added to a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from onward.parameters.limits import DEFAULT_LIMITS, Limits


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """What to minimize; the fields of the section `loss` of RUN.yaml.

    Attributes:
        type: which loss; `graph`: an ONNX model of the user's own; `output`: an output of the model is the loss.
        prediction: the output, or another value, of the model that is compared; for `output`, the loss itself.
        label: the input that it is compared with; added to the graph, unless the graph has an input of that name.
        class_axis: axis of the classes in the prediction (softmax_cross_entropy, ctc).
        ignore_index: label that does not count (softmax_cross_entropy; bert: 0, its padding id; ctc: pads labels, -1).
        class_weights: one weight a class (softmax_cross_entropy).
        reduction: mean, or sum.
        from_logits: the prediction is logits, not probabilities (binary_cross_entropy).
        dense_labels: labels are float probabilities in the prediction's shape (softmax_cross_entropy).
        label_type: element type of the added label input in ONNX's spelling ("int32"); absent: int64 for classes,
            else float (double for a model that computes in double).
        blank: class that stands for no label (ctc; absent: 0).
        time_axis: axis of the time steps in the prediction (ctc); absent: the one that is not the batch.
        prediction_lengths: input `[batch]`: how many time steps of each sample count (ctc); absent: all.
        zero_infinity: samples with more labels than time steps count as 0 (ctc; absent: true).
        graph: path of the user's ONNX loss model (type `graph`).
        graph_inputs: input of the loss model -> output of the model, or name of the label input to add.
        graph_output: output of the loss model that is the loss; absent: its first.
        masked_lm_prediction: logits `[batch, sequence, vocabulary]` of the masked language model (bert).
        next_sentence_prediction: logits `[batch, 2]` (bert).
        masked_lm_positions: input `[batch, masked]`, int64: which positions of the sequence were masked (bert).
        masked_lm_ids: input `[batch, masked]`, int64: the tokens that belong there (bert).
        next_sentence_label: input `[batch]`, int64 (bert).
        limits: what a loss model may ask of the machine; no field of the section.
    """

    type: str
    prediction: str | None = None
    label: str | None = None
    class_axis: int = -1
    ignore_index: int | None = None
    class_weights: Sequence[float] | None = None
    reduction: Literal["mean", "sum"] = "mean"
    from_logits: bool = False
    dense_labels: bool = False
    label_type: str | None = None
    blank: int | None = None
    time_axis: int | None = None
    prediction_lengths: str | None = None
    zero_infinity: bool | None = None
    graph: str | os.PathLike[str] | None = None
    graph_inputs: Mapping[str, str] = field(default_factory=dict)
    graph_output: str | None = None
    masked_lm_prediction: str = "output1"
    next_sentence_prediction: str = "output2"
    masked_lm_positions: str = "masked_lm_positions"
    masked_lm_ids: str = "masked_lm_ids"
    next_sentence_label: str = "next_sentence_labels"
    limits: Limits = DEFAULT_LIMITS


@dataclass(frozen=True, kw_only=True)
class LossNames:
    """Where the loss is in the graph.

    Attributes:
        loss: the value to minimize, an output of the graph; float32 of rank 0.
        parts: further outputs of the graph that the loss is made of (bert: mlm_loss, nsp_loss).
        labels: inputs of the graph that are labels, those it had already included.
        constants: initializers that belong to the loss and never train.
        correct: how many labels (ctc: label sequences) the prediction hits, if asked for: an int64 output of rank 0.
        counted: of how many; of a binary cross entropy, labels that are 0 or 1.
        classes: labels that are classes, each with how many there are, where the model fixes that.
        notes: what the loss is computed from instead of the prediction, for the user.
        holds_probabilities: whether the prediction, as the model computes it, holds probabilities and not logits.
        outputs: of the model, from which a function outside of the graph computes the loss; `loss` is empty then.
    """

    loss: str
    parts: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    correct: str | None = None
    counted: str | None = None
    classes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    holds_probabilities: bool = False
    outputs: tuple[str, ...] = ()

    @property
    def computed(self) -> tuple[str, ...]:
        """The values that a training pass computes: the loss, or what it is computed from."""
        return self.outputs or (self.loss,)
