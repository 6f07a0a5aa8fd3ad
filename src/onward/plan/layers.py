"""The layers of a network from its inputs to its output, by which weights are chosen and their learning rates scaled.

They are found in the graph of the entire network, so that all ranks find the same: blocks that repeat are a layer each,
what comes before them is the first layer, what comes after them the last.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onward.errors import ParametersError
from onward.graph.cuts import find_cut_points
from onward.graph.training_graph import TrainingGraph
from onward.plan.costs.segments import assign, held_weights
from onward.plan.zero_units import find_rows


@dataclass(frozen=True)
class Layers:
    """Which layer a weight is of.

    Attributes:
        of_weight: trainable weight -> its layer, from 0; one that several layers read is of the first of them.
        count: of layers.
        blocks: the layers that are blocks, ascending; without blocks that repeat, all but the last.
    """

    of_weight: Mapping[str, int]
    count: int
    blocks: range

    def factors(self, decay: float) -> dict[str, float]:
        """The decay to the power of a weight's distance from the last layer, whose factor is 1."""
        return {name: decay ** (self.count - 1 - layer) for name, layer in self.of_weight.items()}

    def before_last_blocks(self, blocks: int) -> tuple[str, ...]:
        """The weights of all layers but so many last blocks and what comes after them.

        Raises:
            ParametersError: there are not so many blocks, or nothing comes after them where none is asked for.
        """
        first = self.blocks.stop - blocks
        if blocks > len(self.blocks) or first >= self.count:
            expected = f"1 to {len(self.blocks)}" if first >= self.count else f"0 to {len(self.blocks)}"
            raise ParametersError(
                f"training.train_last is {blocks}; the network has {len(self.blocks)} blocks, and "
                f"{self.count - self.blocks.stop} layers after them. Set it to {expected}, or name what to train in "
                "training.weights_to_train."
            )
        return tuple(name for name, layer in self.of_weight.items() if layer < first)


def find_layers(graph: TrainingGraph) -> Layers:
    """The layers of a network.

    Args:
        graph: of the entire network, with its loss.
    """
    main = graph.model.graph
    points = find_cut_points(main, graph.weights)
    ends, nodes = [point.nodes_before for point in points], list(main)
    segments: list[list[ir.Node]] = [
        nodes[start:end] for start, end in zip([0, *ends], [*ends, len(nodes)], strict=True)
    ]
    _, readers = assign(segments, graph.weights)
    rows = find_rows(held_weights(main, len(segments), readers))
    # Without repetition every segment, which has a weight of its own, is a layer.
    blocks = [
        range(start, start + period)
        for first, period, count in rows
        for start in range(first, first + period * count, period)
    ] or [range(index, index + 1) for index in range(len(segments) - 1)]
    starts = {0, *(block.start for block in blocks)}
    ended = {block.stop for block in blocks if block.stop < len(segments)}
    layer_of_segment, layer = list[int](), -1
    for index in range(len(segments)):
        layer += index in starts or index in ended
        layer_of_segment.append(layer)
    first_block = layer_of_segment[blocks[0].start] if blocks else 0
    last_block = layer_of_segment[blocks[-1].start] if blocks else -1
    return Layers(
        of_weight={name: layer_of_segment[found[0]] for name, found in readers.items()},
        count=layer + 1,
        blocks=range(first_block, last_block + 1),
    )


def note_on_train_last(blocks: int, graph: TrainingGraph, left_out: Collection[str]) -> str:
    """What to report of a run that trains the last blocks only.

    Args:
        blocks: how many.
        graph: with all weights.
        left_out: those of them that are not trained.
    """
    sizes = {name: math.prod(shape_of_weight(graph, name)) for name in graph.weights}
    trained = sum(size for name, size in sizes.items() if name not in left_out)
    found = find_layers(graph)
    return (
        f"training.train_last is {blocks}: of {found.count} layers, {len(found.blocks)} of them blocks, the last "
        f"{blocks + found.count - found.blocks.stop} are trained, {trained:,} of {sum(sizes.values()):,} parameters."
    )


def shape_of_weight(graph: TrainingGraph, name: str) -> tuple[int, ...]:
    """The full shape of a weight."""
    stored = graph.model.graph.initializers[name].const_value
    assert stored is not None
    return tuple(int(size) for size in stored.shape.numpy())
