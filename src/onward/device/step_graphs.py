"""A step of training as graphs over the state of a device: one graph, or one a pass and one an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_ir as ir
import torch

from onward.artifacts.lowered import Lowered
from onward.artifacts.optimizer_graph import (
    GRADIENT_NORM,
    RATE_SUMS,
    UPDATE_COUNT,
    add_input,
    add_output,
    append_formulas,
    empty_model,
    gradient_name,
    new_name,
    slot_shapes,
)
from onward.artifacts.pooling_places import compute_places_directly
from onward.artifacts.training_graph import build_training_graph
from onward.device.label_counts import append_count
from onward.device.layout import (
    ACCUMULATED,
    LOSS_SCALE,
    LOSS_SUM,
    SEED,
    SKIPPED,
    Kind,
    StateTensor,
    accumulator_name,
    average_name,
    count_name,
    kept_name,
)
from onward.device.loss_parts import means_of, repeat_for_parts
from onward.device.loss_scaling import append_scale_update, fix_static_scale, scale_state
from onward.device.master_weights import master_of
from onward.device.random_numbers import draw_from_counters
from onward.engine.network.precision import Precision
from onward.graph.nodes.node_writer import NodeWriter
from onward.lowering.module import OnnxModule
from onward.optim.loss_scale import LossScale
from onward.optim.schedules import LearningRateSchedule
from onward.optimizers.registry import optimizer_named
from onward.parameters import Optimizer, Parameters

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def step_graphs(
    net: OnnxModule, parameters: Parameters, rules: Optimizer, scale: LossScale | None = None
) -> tuple[dict[str, ir.Model], list[StateTensor]]:
    """The graphs of a step by name, and the state that they keep.

    Args:
        net: of the run's network, its first output the loss.
        parameters: of the run, the round given in steps.
        rules: the section `optimizer` with exact names of weights.
        scale: of the loss of a network `with_loss_scale`, which computes in fp16; None: in the types of the model.

    Raises:
        ModelError: it cannot be written in standard operators.
        ParametersError: the optimizer's update cannot.
    """
    pass_graph = _PassGraph.of(net, parameters, scale)
    state = _learned(net, rules)
    accumulation = parameters.training.gradient_accumulation_steps
    counters = [_counter(UPDATE_COUNT), _counter(SKIPPED)]
    seed = StateTensor(
        name=SEED, dtype=INT64, shape=(), kind="seed", start=ir.tensor(np.int64(parameters.training.seed), name=SEED)
    )
    state += [*counters, *([seed] if pass_graph.draws else []), *([] if scale is None else scale_state(scale))]
    if optimizer_named(rules.training_optimizer_name).averages_weights:
        state += [StateTensor(name=name, dtype=FLOAT, shape=(), kind="moment") for name in RATE_SUMS]
        state += [replace(one, name=average_name(one.name), kind="average") for one in state if one.kind == "weight"]
    rates = _update_rates(parameters)
    if accumulation == 1:
        _append_step(pass_graph, rules, rates, scale)
        return {"step": pass_graph.model}, state
    weights = [tensor for tensor in state if tensor.kind == "weight"]
    statistics = [tensor for tensor in state if tensor.kind == "statistic"]
    parts = len(pass_graph.gradients)
    update = _update_graph(weights, statistics, rules, rates, pass_graph.divides, parts, scale)
    _append_accumulation(pass_graph)
    for part in range(parts):
        state += [_accumulator(accumulator_name(one.name, part), one.dtype, one.shape) for one in weights]
    counts = [count_name(part) for part in range(parts)]
    state += [_accumulator(name, FLOAT, ()) for name in (*counts, LOSS_SUM)]
    state += [_counter(ACCUMULATED)]
    state += [
        StateTensor(name=kept_name(one.name), dtype=one.dtype, shape=one.shape, kind="statistic", start=one.start)
        for one in statistics
    ]
    return {"train": pass_graph.model, "update": update}, state


@dataclass(frozen=True)
class _Rates:
    """The learning rate that state begins with, and that of every update, what stays the same at the end once."""

    initial: float
    of_updates: np.ndarray[tuple[int], np.dtype[np.float32]]


def _update_rates(parameters: Parameters) -> _Rates:
    """Of the round."""
    training = parameters.training
    schedule = LearningRateSchedule(parameters.learning_rate, training.steps)
    accumulation = training.gradient_accumulation_steps
    steps = range(accumulation, training.steps + 1, accumulation)
    rates = np.array([schedule.at(step) for step in steps] or [schedule.at(training.steps)], dtype=np.float32)
    changes = np.flatnonzero(np.diff(rates))
    return _Rates(parameters.learning_rate.initial_lr, rates[: changes[-1] + 2 if changes.size else 1])


def _counter(name: str) -> StateTensor:
    return StateTensor(name=name, dtype=INT64, shape=(), kind="counter")


def _accumulator(name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> StateTensor:
    return StateTensor(name=name, dtype=dtype, shape=shape, kind="accumulator")


def _learned(net: OnnxModule, rules: Optimizer) -> list[StateTensor]:
    """Weights, their moments, and running statistics."""
    own, graph, found = net.tensors_by_name(), net.graph, list[StateTensor]()
    for name in (*graph.weights, *graph.states):
        tensor = own[name].detach().cpu().contiguous()
        stored = ir.tensor_adapters.TorchTensor(tensor.float() if tensor.element_size() < 4 else tensor, name=name)
        shape, is_weight = tuple(int(size) for size in tensor.shape), name in graph.weights
        kind: Kind = "weight" if is_weight else "statistic"
        found.append(StateTensor(name=name, dtype=stored.dtype, shape=shape, kind=kind, start=stored))
        slots = slot_shapes(rules, name, shape) if is_weight else {}
        found += [StateTensor(name=n, dtype=stored.dtype, shape=size, kind="moment") for n, size in slots.items()]
    return found


@dataclass(kw_only=True)
class _PassGraph:
    """A forward and backward pass over inputs without defaults.

    Attributes:
        model: changed in place.
        weights: by name, in the type that the update computes in.
        gradients: by weight, of each mean that the loss is the sum of where passes are accumulated as one batch.
        statistics: (old, new) by name.
        losses: what is minimized, the sum of all.
        counts: for each, appends what a pass counts for in its update; none: as much as every other.
        divides: whether sums are divided by what was counted.
        draws: whether it draws random numbers.
    """

    model: ir.Model
    weights: Mapping[str, ir.Value]
    gradients: Sequence[Mapping[str, ir.Value]]
    statistics: Mapping[str, tuple[ir.Value, ir.Value]]
    losses: Sequence[ir.Value]
    counts: Sequence[Callable[[NodeWriter], ir.Value]]
    divides: bool
    draws: bool

    @classmethod
    def of(cls, net: OnnxModule, parameters: Parameters, scale: LossScale | None) -> _PassGraph:
        training, loss = parameters.training, parameters.loss
        lowered = None if scale is None else Lowered.of(net, Precision(torch.float16), (LOSS_SCALE,))
        model = build_training_graph(net, training.mapped_dimensions, lowered)
        compute_places_directly(model)
        graph = model.graph
        for name in (*net.graph.weights, *net.graph.states):
            graph.initializers.pop(name).const_value = None
        outputs = {str(value.name): value for value in graph.outputs}
        features = list(graph.inputs[: len(net.program.inputs)])
        counters = [_new_input(model, SEED), _new_input(model, UPDATE_COUNT)]
        if training.gradient_accumulation_steps > 1:
            counters.append(_new_input(model, ACCUMULATED))
        draws = draw_from_counters(model, counters) > 0
        for counter in counters:
            if not counter.uses():
                graph.inputs.remove(counter)
        minimized = [net.program.outputs[0], *map(gradient_name, net.graph.weights)]
        wanted = [next(value for value in graph.outputs if value.name == name) for name in minimized]
        means = means_of(net.graph, parameters)
        found = repeat_for_parts(model, wanted, len(means)) if len(means) > 1 else [wanted]
        inputs = {str(value.name): value for value in graph.inputs}
        outputs = {str(value.name): value for value in graph.outputs}
        graph.outputs.clear()
        writer = NodeWriter(model, "step/")
        if scale is not None:
            held = fix_static_scale(model, scale)
            found = [[_divided_by(writer, value, held) for value in values] for values in found]
        losses = [values[0] for values in found]
        total = losses[0] if len(losses) == 1 else writer.apply("Add", *losses)
        _add_loss(writer, total, features[0], loss.reduction == "sum")
        is_one_batch, is_sum = training.accumulate_as == "one_batch", loss.reduction == "sum"
        counted = training.gradient_accumulation_steps > 1 and is_one_batch and not is_sum
        return cls(
            model=model,
            weights={name: master_of(writer, inputs[name]) for name in net.graph.weights},
            gradients=[dict(zip(net.graph.weights, values[1:], strict=True)) for values in found],
            statistics={name: (inputs[name], outputs[new_name(name)]) for name in net.graph.states},
            losses=losses,
            counts=[partial(append_count, inputs=inputs, feature=features[0], counted=one) for one in means]
            if counted
            else [],
            divides=not (is_one_batch and is_sum),
            draws=draws,
        )


def _divided_by(writer: NodeWriter, value: ir.Value, scale: ir.Value) -> ir.Value:
    wide = value if value.dtype is FLOAT else writer.cast(value, FLOAT)
    found = writer.apply("Div", wide, scale)
    found.type = ir.TensorType(FLOAT)
    return found


def _new_input(model: ir.Model, name: str) -> ir.Value:
    return add_input(model, name, INT64, ())


def _add_loss(writer: NodeWriter, minimized: ir.Value, feature: ir.Value, is_sum: bool) -> None:
    """The loss as it is reported, of sums a sample, as an output that only it is."""
    name = str(minimized.name)
    minimized.name = writer.unique(f"step/{name}")
    if is_sum:
        samples = writer.cast(writer.squeeze(writer.size_of(feature, 0), 0), FLOAT)
        reported = writer.apply("Div", minimized, samples)
    else:
        reported = writer.apply("Identity", minimized)
    add_output(writer.model, reported, "loss", FLOAT, ())


def _rate(writer: NodeWriter, every: _Rates, update: ir.Value) -> ir.Value:
    """The learning rate of an update, the first being 0; after the last that of the last."""
    rates = every.of_updates
    if rates.size == 1:
        return writer.constant(rates[0], "learning_rate", np.float32)
    last = writer.constant(rates.size - 1, "last_update")
    place = writer.apply("Min", update, last)
    return writer.apply("Gather", writer.constant(rates, "learning_rates", np.float32), place, name="learning_rate")


def _keep_averages(model: ir.Model, weights: Iterable[str]) -> None:
    """Averages that an optimizer gives out are state: evaluation and inference take them."""
    averages = {average_name(name) for name in weights}
    for value in model.graph.outputs:
        if value.name in averages:
            value.name = new_name(str(value.name))


def _count_updates(writer: NodeWriter, update: ir.Value, skipped: ir.Value, finite: ir.Value) -> None:
    counted = writer.apply("Add", update, writer.constant(1, "one"))
    add_output(writer.model, counted, new_name(UPDATE_COUNT), INT64, ())
    more = writer.apply("Add", skipped, writer.cast(writer.apply("Not", finite), INT64))
    add_output(writer.model, more, new_name(SKIPPED), INT64, ())


def _append_step(done: _PassGraph, rules: Optimizer, rates: _Rates, scale: LossScale | None) -> None:
    model = done.model
    writer = NodeWriter(model, "update/")
    update = next((v for v in model.graph.inputs if v.name == UPDATE_COUNT), None) or _new_input(model, UPDATE_COUNT)
    skipped = _new_input(model, SKIPPED)
    before = writer.apply("Sub", update, skipped)
    for name, (_, new) in done.statistics.items():
        new.name = writer.unique(f"step/{name}_new")
    appended = append_formulas(
        writer,
        rules,
        done.weights,
        done.gradients[0],
        _rate(writer, rates, update),
        before,
        finite_too=done.losses,
        statistics=done.statistics,
        initial_lr=rates.initial,
    )
    _keep_averages(model, done.weights)
    _count_updates(writer, update, skipped, appended.finite)
    if scale is not None:
        append_scale_update(writer, scale, appended.finite)
    add_output(model, appended.norm, GRADIENT_NORM, FLOAT, ())
    model.graph.sort()


def _append_accumulation(done: _PassGraph) -> None:
    """Adds gradients, weighed by what the pass counts for, to accumulators."""
    model = done.model
    writer = NodeWriter(model, "accumulate/")
    once = None if done.counts else writer.constant(1.0, "one_pass", np.float32)
    losses = []
    for part, (loss, gradients) in enumerate(zip(done.losses, done.gradients, strict=True)):
        count = once if once is not None else done.counts[part](writer)
        for name, gradient in gradients.items():
            dtype = done.weights[name].dtype
            assert dtype is not None
            wide = gradient if gradient.dtype is dtype else writer.cast(gradient, dtype)
            if once is None:
                wide = writer.apply("Mul", wide, count if dtype is FLOAT else writer.cast(count, dtype))
            _add_to(writer, accumulator_name(name, part), wide, dtype, done.weights[name].shape)
        _add_to(writer, count_name(part), count, FLOAT, ())
        losses.append(writer.cast(loss, FLOAT) if once is not None else writer.apply("Mul", loss, count))
    _add_to(writer, LOSS_SUM, losses[0] if len(losses) == 1 else writer.apply("Add", *losses), FLOAT, ())
    _add_to(writer, ACCUMULATED, writer.constant(1, "one"), INT64, ())
    for name, (old, new) in done.statistics.items():
        new.name = None
        add_output(model, new, new_name(name), old.dtype, old.shape)
    model.graph.sort()


def _add_to(writer: NodeWriter, name: str, value: ir.Value, dtype: ir.DataType, shape: object) -> None:
    model = writer.model
    held = next((v for v in model.graph.inputs if v.name == name), None) or add_input(model, name, dtype, shape)
    add_output(model, writer.apply("Add", held, value), new_name(name), dtype, shape)


def _update_graph(
    weights: Sequence[StateTensor],
    statistics: Sequence[StateTensor],
    rules: Optimizer,
    rates: _Rates,
    divides: bool,
    parts: int,
    scale: LossScale | None,
) -> ir.Model:
    """The update from accumulators, which it sets to zero."""
    model = empty_model("update")
    writer = NodeWriter(model, "update/")
    held = {one.name: add_input(model, one.name, one.dtype, one.shape) for one in weights}
    sums = [
        {one.name: add_input(model, accumulator_name(one.name, part), one.dtype, one.shape) for one in weights}
        for part in range(parts)
    ]
    counted = [add_input(model, count_name(part), FLOAT, ()) for part in range(parts)]
    loss = add_input(model, LOSS_SUM, FLOAT, ())
    accumulated, update, skipped = (_new_input(model, name) for name in (ACCUMULATED, UPDATE_COUNT, SKIPPED))
    now = {one.name: add_input(model, one.name, one.dtype, one.shape) for one in statistics}
    kept = {one.name: add_input(model, kept_name(one.name), one.dtype, one.shape) for one in statistics}
    means = [_divided(writer, *pair) if divides else pair[0] for pair in zip(sums, counted, strict=True)]
    gradients = dict(means[0])
    for name, value in gradients.items() if parts > 1 else ():
        gradients[name] = writer.apply("Sum", *(one[name] for one in means))
        gradients[name].type = value.type
    rate, before = _rate(writer, rates, update), writer.apply("Sub", update, skipped)
    done = append_formulas(
        writer, rules, held, gradients, rate, before, finite_too=[loss, *now.values()], initial_lr=rates.initial
    )
    for name, value in now.items():
        chosen = writer.apply("Where", done.finite, value, kept[name])
        add_output(model, chosen, new_name(name), value.dtype, value.shape)
        copy = writer.apply("Identity", chosen)
        add_output(model, copy, new_name(kept_name(name)), value.dtype, value.shape)
    _keep_averages(model, held)
    _count_updates(writer, update, skipped, done.finite)
    if scale is not None:
        append_scale_update(writer, scale, done.finite)
    for value in (*(value for one in sums for value in one.values()), *counted, loss, accumulated):
        assert value.dtype is not None
        assert value.shape is not None
        zero = writer.constant(0, "zero", value.dtype.numpy())
        filled = writer.apply("Expand", zero, writer.constant(value.shape.numpy(), "sizes"))
        add_output(model, filled, new_name(str(value.name)), value.dtype, value.shape)
    add_output(model, done.norm, GRADIENT_NORM, FLOAT, ())
    for value in (accumulated, *counted):
        if not value.uses():
            model.graph.inputs.remove(value)
    return model


def _divided(writer: NodeWriter, sums: Mapping[str, ir.Value], counted: ir.Value) -> dict[str, ir.Value]:
    """Sums over what was counted; where that is nothing, gradients are zero."""
    one = writer.constant(1.0, "one_label", np.float32)
    above = writer.apply("Greater", counted, writer.constant(0.0, "no_label", np.float32))
    divisor, found = writer.apply("Where", above, counted, one), {}
    for name, value in sums.items():
        assert value.dtype is not None
        own = divisor if value.dtype is FLOAT else writer.cast(divisor, value.dtype)
        found[name] = writer.apply("Div", value, own)
        found[name].type = ir.TensorType(value.dtype)
    return found
