"""First scales of activations in quantization-aware training: from what the float network computes of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from onward.data.batches import Batch
from onward.engine.inputs.features import FeatureReader
from onward.engine.state import TrainState
from onward.graph.quantize_aware.quantizers import quantizing_nodes
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import OnnxModule
from onward.parallel.messages import all_gather_json


def calibrate(state: TrainState, graph: TrainingGraph, batch: Batch) -> str | None:
    """Sets the scales that are to be trained and are not known yet, the same on every rank; a note, if there are any.

    One rank of each replica computes its first batch with the unsharded network of the file.

    Args:
        state: before the first update.
        graph: of the entire network.
        batch: of this replica.
    """
    wanted = {one.value: one for one in graph.quantizers if one.observer == "lsq" and not one.is_calibrated}
    if not wanted or state.counters.update or state.counters.round:
        return None
    place = state.mesh.place
    own = _largest(graph, tuple(wanted), batch, state.device) if place.horizontal == place.pipeline == 0 else {}
    every = [own] if state.mesh.control is None else all_gather_json(state.mesh.control, own)
    for value, quantizer in wanted.items():
        weight = state.weights.get(quantizer.scale)
        if weight is not None:
            largest = max(float(one[value]) for one in every if value in one)
            weight.parameter.detach().fill_(largest / quantizer.largest if largest else 1.0)
            weight.update_followers()
    if state.local_sgd is not None:
        state.local_sgd.begin()
    return f"quantize_aware: the first batch gave the first scales of {len(wanted)} activations."


@torch.no_grad()
def _largest(graph: TrainingGraph, values: tuple[str, ...], batch: Batch, device: torch.device) -> Mapping[str, float]:
    """The largest absolute value of each activation where none is quantized."""
    model = graph.model.clone()
    for node in quantizing_nodes(model.graph).values():
        if node.inputs[0] is not None and node.inputs[0].const_value is None:
            for use in list(node.outputs[0].uses()):
                use.node.outputs[0].replace_all_uses_with(node.inputs[0])
    net = OnnxModule(dataclasses.replace(graph, model=model), values).to(device).eval()
    inputs = FeatureReader(graph, net.program.inputs, device).to_tensors(batch.features)
    found = net(**{name: inputs[name] for name in net.program.inputs})
    tensors = found if isinstance(found, tuple) else (found,)
    return {name: float(tensor.abs().amax()) for name, tensor in zip(values, tensors, strict=True)}
