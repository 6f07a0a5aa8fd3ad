"""What onward knows of a loss: one frozen value that each file of this folder defines.

A loss writes its nodes with what it is given, a `LossWriter`, and so imports nothing of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from onward.losses.labels import LabelCount, LabelRange

if TYPE_CHECKING:
    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter
    from onward.parameters import Loss, Parameters

MetricTask = Literal["", "multiclass", "binary"]


def _range_of_all(loss: Loss, label: str, classes: int) -> LabelRange:
    return LabelRange(classes, loss.ignore_index)


def _mean_over_samples(loss: Loss) -> tuple[LabelCount | None, ...]:
    return (None,)


def _no_problems(parameters: Parameters) -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """A type of loss.

    Attributes:
        name: the value of `loss.type`.
        add: writes it as nodes; None: it is computed outside of the graph.
        remark: what the reference says of the name.
        short_name: by which `onward.fit` knows it, too.
        required: fields of the section `loss` that must be given.
        reads: further fields that it reads; they are refused with losses that do not.
        predictions: fields that name the outputs it compares.
        labels: fields that name the features they are compared with.
        find_problems: what forbids it in combination with other fields, a sentence each.
        label_range: (section, label, classes of the label) -> which labels there are.
        normalizer: what each minimized value is a mean over: labels, or samples (None). Several: the loss is the sum of
            its parts.
        accuracy: metric that hit labels are reported as.
        task: what metrics of classification compute of it.
        has_soft_targets: whether a teacher's class probabilities can be targets, too.
        has_operators: whether ONNX has operators for it.
        is_of_pairs: whether a sample holds two, both of which the model computes.
        is_of_sequences: whether labels are sequences without a place in time each.
        label_text: type and shape of a label there; empty: as many numbers as the prediction has, or class numbers.
    """

    name: str
    add: Callable[[LossWriter], LossNames] | None
    remark: str = ""
    short_name: str = ""
    required: tuple[str, ...] = ("prediction", "label")
    reads: tuple[str, ...] = ()
    predictions: tuple[str, ...] = ("prediction",)
    labels: tuple[str, ...] = ("label",)
    find_problems: Callable[[Parameters], list[str]] = _no_problems
    label_range: Callable[[Loss, str, int], LabelRange] = _range_of_all
    normalizer: Callable[[Loss], tuple[LabelCount | None, ...]] = _mean_over_samples
    accuracy: str = "accuracy"
    task: MetricTask = ""
    has_soft_targets: bool = False
    has_operators: bool = True
    is_of_pairs: bool = False
    is_of_sequences: bool = False
    label_text: str = ""

    @property
    def is_an_output(self) -> bool:
        """Whether an output of the model is the loss itself."""
        return self.required == ("prediction",)

    @property
    def own_ports(self) -> tuple[str, ...]:
        """Fields that name outputs and features and that no other loss reads."""
        return tuple(name for name in (*self.predictions, *self.labels) if name not in ("prediction", "label"))

    def compared(self, loss: Loss) -> tuple[str | None, str | None]:
        """The output and the feature that metrics compare, where each is one."""
        output, feature = (names[0] if len(names) == 1 else "" for names in (self.predictions, self.labels))
        return (getattr(loss, output), getattr(loss, feature)) if output and feature else (None, None)
