"""Inputs that say where bags of ids begin: positions in a whole batch, which no sample of a data set has.

`nn.EmbeddingBag` takes them as `offsets`. A run puts its batches together out of samples, so it refuses such a model.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.cuts import reads
from onward.graph.fusion.rewriting import DOMAIN
from onward.graph.operators import Fact, operators_with

_MOVES = operators_with(Fact.SAME_ELEMENTS) | {"Cast", "Concat"}
_BOUNDS = 2
"""Operand of `EmbeddingBag` that says where each bag begins."""


def refuse_bag_starts(model: ir.Model) -> None:
    """Refuses a model of which an input says where bags begin.

    Args:
        model: as it is trained, with bags as one node each (`graph/fusion/embedding_bag.py`).

    Raises:
        ModelError: an input does; with its name and what to do.
    """
    origin = {value: str(value.name) for value in model.graph.inputs if not value.is_initializer()}
    for node in model.graph:
        known = [origin[value] for value in reads(node) if value in origin]
        if node.op_type in _MOVES and known:
            origin.update(dict.fromkeys(node.outputs, known[0]))
        if node.domain != DOMAIN or node.op_type != "EmbeddingBag" or len(node.inputs) <= _BOUNDS:
            continue
        starts = node.inputs[_BOUNDS]
        if starts in origin:
            raise ModelError(
                f"input {origin[starts]!r} says at which position of a whole batch each bag of ids begins "
                "(EmbeddingBag), but a run puts batches together out of samples, which know no such positions. Export "
                "the module with ids [batch, ids of a sample] and without offsets, or train it in a loop of your own "
                "with onward.to_torch."
            )
