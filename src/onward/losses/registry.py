"""The losses that `loss.type` can name, in the order in which pages list them: a new one is a line here."""

from __future__ import annotations

from onward.losses.bert import BERT
from onward.losses.binary_cross_entropy import BINARY_CROSS_ENTROPY
from onward.losses.ctc import CTC
from onward.losses.dice import BINARY_DICE, DICE
from onward.losses.dpo import DPO
from onward.losses.focal import FOCAL, SOFTMAX_FOCAL
from onward.losses.function import FUNCTION
from onward.losses.info_nce import INFO_NCE
from onward.losses.kind import LossKind
from onward.losses.l1 import L1
from onward.losses.mean_squared_error import MEAN_SQUARED_ERROR
from onward.losses.output import OUTPUT
from onward.losses.softmax_cross_entropy import SOFTMAX_CROSS_ENTROPY
from onward.losses.user_graph import GRAPH

LOSSES: tuple[LossKind, ...] = (
    SOFTMAX_CROSS_ENTROPY,
    MEAN_SQUARED_ERROR,
    BINARY_CROSS_ENTROPY,
    L1,
    FOCAL,
    SOFTMAX_FOCAL,
    DICE,
    BINARY_DICE,
    INFO_NCE,
    DPO,
    CTC,
    BERT,
    GRAPH,
    OUTPUT,
    FUNCTION,
)


def loss_named(name: str) -> LossKind:
    """The loss of a name that the parameters accepted."""
    return {kind.name: kind for kind in LOSSES}[name]


def losses_for_init() -> tuple[str, ...]:
    """Losses that need an output and a feature alone, which `onward init` takes; those of classification first."""
    kinds = sorted(LOSSES, key=lambda kind: not kind.task)
    return tuple(kind.name for kind in kinds if kind.required == ("prediction", "label"))
