"""Proof by numbers that a graph whose batch size was rewritten computes each sample as the file does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx_ir as ir
import torch

from onward.errors import ModelError
from onward.graph.reading.model_file import ModelSource
from onward.graph.rebatching.passes import NotRebatched
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.lowering.inspection import why_not_lowered
from onward.lowering.module import OnnxModule
from onward.parameters.limits import DEFAULT_LIMITS, Limits

SAMPLES = 3
"""So many batches of the size that the file has are computed at once, and one by one."""
BOUND = 1e-4
"""How far outputs may differ, as a share of the largest of their tensor: the order of sums, and not of samples."""


def prove_rebatching(
    source: ModelSource, fixed_inputs: Mapping[str, float] | None = None, limits: Limits = DEFAULT_LIMITS
) -> float:
    """Computes a few samples at once and one by one; returns the largest difference, relative to each output.

    Raises:
        NotRebatched: the graph cannot be rewritten, or samples differ.
    """
    read = partial(
        make_training_graph, source, fixed_inputs=fixed_inputs, why_not_lowered=why_not_lowered, limits=limits
    )
    alone, together = read(), read(rebatch=True)
    assert together.rebatching is not None
    one, many = OnnxModule(alone), OnnxModule(together)
    generator = torch.Generator().manual_seed(0)
    batches = [_inputs(alone, together, generator, number) for number in range(SAMPLES)]
    with torch.no_grad():
        separate = [_outputs(one, batch) for batch in batches]
        try:
            joined = _outputs(many, _join(batches, together.rebatching.inputs))
        except ModelError as error:
            raise NotRebatched(f"it fails on {SAMPLES} samples ({error})") from error
    return max((_difference(value, together, joined, separate) for value in together.model.graph.outputs), default=0.0)


def _difference(
    value: ir.Value, graph: TrainingGraph, joined: Mapping[str, torch.Tensor], separate: list[dict[str, torch.Tensor]]
) -> float:
    name = str(value.name)
    if name not in joined:
        return 0.0
    fixed = next(output for output in graph.source.graph.outputs if output.name == name)
    axis = next((place for place, size in enumerate(value.shape or ()) if not isinstance(size, int)), None)
    parts = [one[name] for one in separate]
    expected = parts[0] if axis is None or fixed.shape is None else torch.cat(parts, axis)
    actual = joined[name]
    if actual.shape != expected.shape:
        raise NotRebatched(f"its output {name!r} has shape {list(actual.shape)} for {SAMPLES} samples")
    if not expected.numel():
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    largest = max(float(expected.double().abs().max()), 1e-6)
    found = float(difference) / largest
    if not found <= BOUND:
        raise NotRebatched(
            f"its samples are not independent: {name!r} differs by {found:.1e} of its largest value when {SAMPLES} "
            f"samples are computed as one batch (allowed: {BOUND:.0e})"
        )
    return found


def _outputs(net: OnnxModule, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [str(value.name) for value in net.graph.model.graph.outputs]
    results = net(**{name: inputs[name] for name in net.program.inputs})
    given = results if isinstance(results, tuple) else (results,)
    return {name: one for name, one in zip(names, given, strict=True) if isinstance(one, torch.Tensor)}


def _join(batches: list[dict[str, torch.Tensor]], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Samples along the first axis; inputs without a batch axis are those of the first."""
    return {name: torch.cat([b[name] for b in batches]) if name in names else batches[0][name] for name in batches[0]}


def _inputs(
    alone: TrainingGraph, together: TrainingGraph, generator: torch.Generator, number: int
) -> dict[str, torch.Tensor]:
    """Random inputs of the file's shapes: normal floats, small integers; those without a batch axis always the same."""
    assert together.rebatching is not None
    inputs = {}
    for value in alone.model.graph.inputs:
        name = str(value.name)
        draw = generator if name in together.rebatching.inputs else torch.Generator().manual_seed(1)
        shape = [size if isinstance(size, int) else 4 for size in value.shape or ()]
        dtype = value.dtype or ir.DataType.FLOAT
        if dtype.is_floating_point():
            tensor = torch.randn(shape, generator=draw)
        else:
            tensor = torch.randint(0, _largest(value) + 1, shape, generator=draw)
        inputs[name] = tensor.to(torch.from_numpy(np.empty(0, dtype.numpy())).dtype)
    return inputs


def _largest(value: ir.Value) -> int:
    """An integer that is surely meant: a flag of 0 or 1, or a row of the smallest table that it selects from."""
    if value.dtype is ir.DataType.BOOL:
        return 1
    sizes = []
    for use in value.uses():
        table = use.node.inputs[0]
        if use.node.op_type == "Gather" and use.idx == 1 and table is not None and table.shape is not None:
            axis = use.node.attributes.get("axis")
            size = table.shape[0 if axis is None else axis.as_int()]
            sizes.append(size - 1 if isinstance(size, int) else 1)
    return min(sizes, default=1)
