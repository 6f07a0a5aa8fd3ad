"""Sizes of a network's inputs in a micro-batch, known before there is one."""

from __future__ import annotations

from collections.abc import Mapping

from onward.data.shard import FeatureSpec
from onward.engine.inputs.sample_shapes import fit_sample_shape
from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import input_types
from onward.parameters import Training
from onward.spelling import shortened


def known_dimensions(training: Training, graph: TrainingGraph, specs: Mapping[str, FeatureSpec]) -> dict[str, int]:
    """Symbolic dimensions of a graph's inputs with their sizes in a micro-batch.

    `mapped_dimensions` come first, then what the data's samples have; a first axis is otherwise the batch's.
    """
    _, shapes = input_types(graph)
    found = {shape[0]: training.batch_size for shape in shapes.values() if shape and isinstance(shape[0], str)}
    for name, shape in shapes.items():
        sample = fit_sample_shape(specs[name].shape, shape[1:]) if name in specs and shape else None
        if sample is not None:
            pairs = zip(shape[1:], sample, strict=True)
            found |= {symbol: size for symbol, size in pairs if isinstance(symbol, str) and symbol not in found}
    return found | dict(training.mapped_dimensions)


def input_sizes(graph: TrainingGraph, dimensions: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shape of every input for one micro-batch, known before there is one.

    Raises:
        ParametersError: the size of a dimension is not known.
    """
    _, shapes = input_types(graph)
    missing = [
        f"{size!r} of {name!r}"
        for name, shape in shapes.items()
        for size in shape
        if isinstance(size, str) and size not in dimensions
    ]
    if missing:
        raise ParametersError(
            f"the sizes of {shortened(missing, 5)} are symbolic in the model, and must be known before the first "
            "batch here: for a plan of several processes, a forecast of memory or synthetic data. Set them in "
            "training.mapped_dimensions, like {sequence: 128}."
        )
    return {
        name: tuple(dimensions[size] if isinstance(size, str) else size for size in shape)
        for name, shape in shapes.items()
    }
