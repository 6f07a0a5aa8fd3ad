"""`onward plan --roofline`: what limits a run on one device, operator by operator, counted without running it."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
import torch

from onward.engine.building.preparation import present_feature_specs
from onward.engine.forecast.hardware_here import cluster_here
from onward.engine.forecast.network_work import TrainingGraphs, count_network, search_settings
from onward.engine.network.precision_choice import settled_precision
from onward.graph.training_graph import TrainingGraph
from onward.parameters import Parameters
from onward.parameters.distributed import Distributed
from onward.plan.report.roofline import render_roofline
from onward.plan.roles import find_roles
from onward.plan.search.hardware import known_cluster
from onward.plan.search.roofline import roofline
from onward.report.phases import Phases


def plan_roofline(parameters: Parameters, gpu: str | None, phases: Phases) -> str:
    """The text of a run's roofline, as one device trains it.

    Args:
        parameters: of the run; its section `distributed` is left out.
        gpu: a listed one; None: this machine's device, measured where its rates are not known.
        phases: announce what takes long.

    Raises:
        UserError: of any kind, each with what to do.
    """
    phases.begin("measuring or looking up the hardware")
    cluster = known_cluster(gpu) if gpu is not None else cluster_here(1, parameters.machine.execution_provider)
    device, notes = cluster.device, list[str]()
    if parameters.distributed != Distributed():
        notes.append("the section distributed is left out: one device trains the entire network.")
    alone = dataclasses.replace(parameters, distributed=Distributed())
    alone, chosen = settled_precision(alone, "cuda" if device.is_asynchronous else "cpu", None, device.computes_in_bf16)
    phases.begin(f"reading {parameters.paths.model_path or 'the model'}")
    graphs = TrainingGraphs(alone)
    (work,) = count_network(alone, present_feature_specs(alone), 1, graphs)
    graph, training = graphs.of(False), alone.training
    settings = search_settings(alone, graph, 1, device.memory_bytes, torch.__version__)
    float8 = device.check_types(settings.precision, alone.mixed_precision.float8)
    found = roofline(work, _names(graph), device, settings, training.batch_size, training.gradient_accumulation_steps)
    notes += [note for note in (chosen, float8) if note is not None]
    notes.append(
        "bytes are those of the operators one by one: a compiler that fuses neighbors moves fewer, and a network that "
        "fits into the device's cache reads them faster."
    )
    return render_roofline(found, device, training.batch_size, settings.precision, notes)


def _names(graph: TrainingGraph) -> list[str]:
    """Of each operator, in the order in which `count_network` counts them: its type, and the shape of its matrix."""
    roles = find_roles(graph)
    return [_name(node, graph) for node in roles.nodes if node in roles.bound]


def _name(node: ir.Node, graph: TrainingGraph) -> str:
    tensors = graph.model.graph.initializers
    for value in node.inputs:
        maker = None if value is None else value.producer()
        is_turned = maker is not None and maker.op_type == "Transpose"
        source = maker.inputs[0] if maker is not None and is_turned else value
        stored = None if source is None else tensors.get(str(source.name))
        tensor = None if stored is None else stored.const_value
        if tensor is not None and len(tensor.shape) > 1:
            sizes = [str(size) for size in tensor.shape.numpy()]
            return f"{node.op_type} {'x'.join(reversed(sizes) if is_turned else sizes)}"
    return node.op_type
