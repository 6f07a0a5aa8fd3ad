"""The loss scale of fp16 steps in their graphs, with the rules of `onward.optim.loss_scale`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onward.artifacts.optimizer_graph import add_input, add_output, new_name
from onward.device.layout import FINITE_UPDATES, LOSS_SCALE, StateTensor
from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.training_graph import TrainingGraph
from onward.optim.loss_scale import LossScale

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def with_loss_scale(graph: TrainingGraph) -> TrainingGraph:
    """The same with a loss in fp32 that an input multiplies, so that gradients are those of the scaled loss.

    Raises:
        ModelError: the model has an input of that name.
    """
    model, names = graph.model.clone(), graph.loss_names
    assert names is not None
    if any(value.name == LOSS_SCALE for value in model.graph.inputs):
        raise ModelError(f"the model has an input {LOSS_SCALE!r}, a name that mixed precision needs. Rename it.")
    writer = NodeWriter(model, "scaled/")
    scale = ir.Value(name=LOSS_SCALE, type=ir.TensorType(FLOAT), shape=ir.Shape(()))
    model.graph.inputs.append(scale)
    loss = next(value for node in model.graph for value in node.outputs if value.name == names.loss)
    total = writer.apply("Mul", writer.cast(loss, FLOAT), scale)
    total.type, total.shape = ir.TensorType(FLOAT), ir.Shape(())
    model.graph.outputs.append(total)
    return replace(graph, model=model, loss_names=replace(names, loss=str(total.name)))


def scale_state(scale: LossScale) -> list[StateTensor]:
    """What a device keeps of a loss scale: nothing of a static one."""
    if not scale.dynamic:
        return []
    start = ir.tensor(np.float32(scale.scale), name=LOSS_SCALE)
    return [
        StateTensor(name=LOSS_SCALE, dtype=FLOAT, shape=(), kind="counter", start=start),
        StateTensor(name=FINITE_UPDATES, dtype=INT64, shape=(), kind="counter"),
    ]


def fix_static_scale(model: ir.Model, scale: LossScale) -> ir.Value:
    """The scale of a pass: its input, or a constant in its place where the scale never changes."""
    held = next(value for value in model.graph.inputs if value.name == LOSS_SCALE)
    if scale.dynamic:
        return held
    constant = NodeWriter(model, "scaled/").constant(scale.scale, "static_loss_scale", np.float32)
    held.replace_all_uses_with(constant)
    model.graph.inputs.remove(held)
    return constant


def append_scale_update(writer: NodeWriter, scale: LossScale, finite: ir.Value) -> None:
    """The next dynamic scale as outputs: halved after a skipped update, doubled after a window of finite ones."""
    if not scale.dynamic:
        return
    model = writer.model
    held = next((v for v in model.graph.inputs if v.name == LOSS_SCALE), None) or add_input(
        model, LOSS_SCALE, FLOAT, ()
    )
    counted = add_input(model, FINITE_UPDATES, INT64, ())
    number = {name: writer.constant(getattr(scale, name), name, np.float32) for name in ("minimum", "maximum")}
    two = writer.constant(2.0, "scale_factor", np.float32)
    more = writer.apply("Add", counted, writer.constant(1, "one_finite"))
    is_full = writer.apply("GreaterOrEqual", more, writer.constant(scale.window_updates, "window"))
    doubled = writer.apply("Min", writer.apply("Mul", held, two), number["maximum"])
    halved = writer.apply("Max", writer.apply("Div", held, two), number["minimum"])
    kept = writer.apply("Where", is_full, doubled, held)
    add_output(model, writer.apply("Where", finite, kept, halved), new_name(LOSS_SCALE), FLOAT, ())
    none = writer.constant(0, "none_finite")
    left = writer.apply("Where", is_full, none, more)
    add_output(model, writer.apply("Where", finite, left, none), new_name(FINITE_UPDATES), INT64, ())
