"""Features that pick rows of a table, such as tokens of an embedding, and how many rows there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.errors import DataError
from onward.graph.cuts import reads
from onward.graph.operators import Fact, operators_with
from onward.losses.labels import LabelRange, SampleOrigin, first_place, unknown_origin

_MOVES = operators_with(Fact.SAME_ELEMENTS) | {"Cast"}


@dataclass(frozen=True)
class IndexRange:
    """The rows that a feature may pick: 0 to `rows` - 1.

    Attributes:
        rows: of the smallest table that it picks from.
        table: value that holds them.
    """

    rows: int
    table: str

    @property
    def counted(self) -> tuple[int, int]:
        """From which row to which, the end excluded, it picks."""
        return 0, self.rows

    def check(self, name: str, indices: np.ndarray, origin: SampleOrigin = unknown_origin) -> None:
        """Checks a feature of a batch here, where its numbers still are at hand: a GPU would stop without a word.

        A negative index is refused, too, though Gather counts it from the end
        (https://onnx.ai/onnx/operators/onnx__Gather.html): torch's Embedding refuses it, and in data it marks padding.

        Raises:
            DataError: an index is out of range, with its place and how many there are.
        """
        if not indices.size or (indices.min() >= 0 and indices.max() < self.rows):
            return
        whole = np.trunc(indices) if indices.dtype.kind == "f" else indices  # as the cast before the lookup does it
        outside = (whole < 0) | (whole >= self.rows)
        if not outside.any():
            return
        place = tuple(int(along[0]) for along in outside.nonzero())
        found = int(whole[place]) if np.isfinite(whole[place]) else whole[place]
        advice = "The data may be packed with another tokenizer or vocabulary than the model was made for"
        if found < 0:
            advice = (
                "If it marks padding, write the padding's own index, and leave the padding out of the loss by labels"
            )
        if -self.rows <= found < 0:
            advice += f". It would count from the end of the table: if that is meant, write {self.rows + found}"
        raise DataError(
            f"feature {name!r} holds the index {found}; expected 0 to {self.rows - 1}, since it picks rows of "
            f"{self.table!r}, which has {self.rows}. {int(outside.sum())} of the {indices.size} indices of this batch "
            f"are out of range, {first_place(place, origin)}. {advice}."
        )


FeatureRange = LabelRange | IndexRange
"""Which numbers a feature may hold."""


def index_ranges(model: ir.Model) -> Mapping[str, IndexRange]:
    """Inputs that pick rows of tables, through casts and reshapes -> the rows of the smallest of them.

    A table that is computed from an input has no fixed meaning for its last row, and is left out.
    """
    found: dict[str, IndexRange] = {}
    origin = {value: value for value in model.graph.inputs if not value.is_initializer()}
    computed = set(origin)
    for node in model.graph:
        read = list(reads(node))
        if computed.intersection(read):
            computed.update(node.outputs)
        # A cast to bool makes other numbers of what it reads.
        is_bool = node.op_type == "Cast" and node.attributes.get_int("to") == ir.DataType.BOOL
        if node.op_type in _MOVES and read[0] in origin and not is_bool:
            origin[node.outputs[0]] = origin[read[0]]
        if (
            node.op_type not in ("Gather", "EmbeddingBag")
            or read[1] not in origin
            or read[0] in computed
            or read[0].shape is None
        ):
            continue
        rows, name = read[0].shape[node.attributes.get_int("axis", 0)], str(origin[read[1]].name)
        if isinstance(rows, int) and (name not in found or rows < found[name].rows):
            found[name] = IndexRange(rows, str(read[0].name))
    return found
