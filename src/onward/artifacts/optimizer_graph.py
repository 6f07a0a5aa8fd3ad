"""The weight update as an ONNX graph: weights, gradients, moments and learning rate in, weights and moments out.

Written in operators of the standard's main domain, opset 18, with the clipping and the skipping of gradients that are
not finite that training has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError, ParametersError
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.reading.differentiated import TRAINING_DOMAIN
from onward.graph.writing.model_saving import save_model
from onward.lowering.module import OnnxModule
from onward.optim.building import attributes_of_weight
from onward.parameters import Optimizer

OPSET = 18
"""Of all training graphs."""

IR_VERSION = 10
LEARNING_RATE = "learning_rate"
UPDATE_COUNT = "update_count"
GRADIENT_NORM = "gradient_norm"
_LARGEST_NORM_ERROR = 1e-6
"""What torch's clipping adds to the norm."""


def gradient_name(weight: str) -> str:
    """The name of a weight's gradient."""
    return f"{weight}_grad"


def new_name(name: str) -> str:
    """The name under which the new value of a weight, moment, running statistic or count comes out."""
    return f"{name}_new"


def slot_names(optimizer: Optimizer, weight: str) -> tuple[str, ...]:
    """The names of a weight's moments: the weight's, `_`, and the slot's name in a checkpoint."""
    if optimizer.training_optimizer_name == "SGDOptimizer":
        slots: tuple[str, ...] = ("momentum_buffer",) if attributes_of_weight(optimizer, weight)["momentum"] else ()
    else:
        slots = ("exp_avg", "exp_avg_sq")
    return tuple(f"{weight}_{slot}" for slot in slots)


def write_optimizer_graph(net: OnnxModule, optimizer: Optimizer, path: str | os.PathLike[str]) -> None:
    """Writes one weight update as an ONNX model.

    Inputs: `learning_rate` (float32) and `update_count` (int64, updates done so far), both of rank 0; for every
    trained weight `<weight>`, `<weight>_grad` and its moments (`<weight>_exp_avg` and `<weight>_exp_avg_sq`, or
    `<weight>_momentum_buffer`), zeros at the beginning. Outputs: the new weights and moments as `<name>_new`,
    `update_count_new`, and `gradient_norm`, of all gradients before clipping.

    Raises:
        ParametersError: attributes that contradict each other.
        ModelError: a weight's name clashes with one of these names.
        StorageError: the file cannot be written.
    """
    model = empty_model("optimizer")
    values = dict(net.weights.items())
    weights = {name: _add_input(model, name, ir_type(w.dtype), w.shape) for name, w in values.items()}
    gradients = {name: _add_input(model, gradient_name(name), ir_type(w.dtype), w.shape) for name, w in values.items()}
    append_update(model, optimizer, weights, gradients)
    save_model(model, Path(path))


def empty_model(name: str) -> ir.Model:
    """A model without nodes, of the opset of all training graphs."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="onward")


def ir_type(dtype: Any) -> ir.DataType:
    """The ONNX type of a torch type."""
    return ir.tensor_adapters.from_torch_dtype(dtype)


def append_update(
    model: ir.Model,
    optimizer: Optimizer,
    weights: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    training_operators: bool = False,
) -> None:
    """Appends a weight update to a model, with the inputs it needs in addition to weights and gradients, and its
    outputs.

    With `training_operators`, Adam and Momentum of ai.onnx.preview.training stand where they mean the same.
    """
    rate = _add_input(model, LEARNING_RATE, ir.DataType.FLOAT, ())
    count = _add_input(model, UPDATE_COUNT, ir.DataType.INT64, ())
    slots = {
        name: [_add_input(model, slot, value.dtype, value.shape) for slot in slot_names(optimizer, name)]
        for name, value in weights.items()
    }
    update = _Update(
        writer=NodeWriter(model, "update/"),
        name=optimizer.training_optimizer_name,
        rate=rate,
        updates_before=count,
        shared={},
        training_operators=training_operators,
    )
    updates_now = update.writer.apply("Add", count, update.writer.constant(1, "one"))
    norm, finite = _norm(update.writer, list(gradients.values()))
    share = _clipping_share(update.writer, norm, optimizer.max_norm_clip)
    results: list[tuple[str, ir.Value, ir.Value]] = []
    for name, weight in weights.items():
        attributes = attributes_of_weight(optimizer, name)
        _check(attributes, optimizer.training_optimizer_name)
        gradient = update.widen(gradients[name])
        if share is not None:
            gradient = update.writer.apply("Mul", gradient, update.like(share, gradient))
        olds = [weight, *slots[name]]
        news = update.apply(attributes, updates_now, gradient, [update.widen(old) for old in olds])
        for label, old, new in zip((name, *slot_names(optimizer, name)), olds, news, strict=True):
            results.append((label, old, update.like(new, old)))
    for label, old, new in results:
        _add_output(model, update.writer.apply("Where", finite, new, old), new_name(label), old.dtype, old.shape)
    counted = update.writer.apply("Where", finite, updates_now, count)
    _add_output(model, counted, new_name(UPDATE_COUNT), ir.DataType.INT64, ())
    _add_output(model, norm, GRADIENT_NORM, ir.DataType.FLOAT, ())


def operator_for(name: str, attributes: Mapping[str, Any], dtype: ir.DataType | None) -> tuple[str | None, str]:
    """The operator of ai.onnx.preview.training that updates a weight just so, or None and why there is none."""
    if dtype is ir.DataType.DOUBLE:
        return None, "the attributes of the standard's operators are float32, the weights float64"
    if name == "SGDOptimizer":
        return ("Momentum", "") if attributes["momentum"] else (None, "without momentum it is one subtraction")
    if name == "Lamb":
        return None, "the standard has no LAMB"
    if name == "AdamW" and attributes["lambda"]:
        return None, "the decay of the standard's Adam is not scaled by the learning rate, AdamW's is"
    if attributes["do_bias_correction"] and attributes["epsilon"]:
        return None, "the standard's Adam adds epsilon to the uncorrected second moment, torch's to the corrected one"
    return "Adam", ""


def _check(attributes: Mapping[str, Any], name: str) -> None:
    if name == "SGDOptimizer" and attributes["nesterov"] and not attributes["momentum"]:
        raise ParametersError("optimizer_attributes: nesterov is true while momentum is 0; set a momentum.")


def _norm(writer: NodeWriter, gradients: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """The L2 norm of all gradients, float32, and whether it is finite."""
    squares = [writer.apply("ReduceSumSquare", writer.cast(g, ir.DataType.FLOAT), keepdims=0) for g in gradients]
    norm = writer.apply("Sqrt", writer.apply("Sum", *squares), name="norm")
    norm.type = ir.TensorType(ir.DataType.FLOAT)
    rest = writer.apply("Sub", norm, norm)
    return norm, writer.apply("Equal", rest, writer.constant(0.0, "zero", np.float32), name="finite")


def _clipping_share(writer: NodeWriter, norm: ir.Value, largest: float | None) -> ir.Value | None:
    """What gradients are multiplied with so that their norm is at most `largest`, as torch's clipping computes it."""
    if largest is None:
        return None
    above = writer.apply("Add", norm, writer.constant(_LARGEST_NORM_ERROR, "norm_epsilon", np.float32))
    share = writer.apply("Div", writer.constant(largest, "largest_norm", np.float32), above)
    return writer.apply("Min", share, writer.constant(1.0, "no_clipping", np.float32))


@dataclass(kw_only=True)
class _Update:
    """Writes the update of one weight after the other, numbers that several of them need only once.

    Computes in float32, float64 weights in float64.
    """

    writer: NodeWriter
    name: str
    rate: ir.Value
    updates_before: ir.Value
    shared: dict[tuple[Any, ...], ir.Value]
    training_operators: bool

    def like(self, value: ir.Value, other: ir.Value) -> ir.Value:
        """A value in the type of another."""
        assert other.dtype is not None
        return value if value.dtype == other.dtype else self._typed(self.writer.cast(value, other.dtype), other.dtype)

    def widen(self, value: ir.Value) -> ir.Value:
        """A value in the type that is computed in."""
        wide = ir.DataType.DOUBLE if value.dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT
        return value if value.dtype is wide else self._typed(self.writer.cast(value, wide), wide)

    def apply(
        self, attributes: Mapping[str, Any], count: ir.Value, gradient: ir.Value, olds: list[ir.Value]
    ) -> list[ir.Value]:
        """The new weight and moments of [weight, moments]."""
        weight, *slots = olds
        rate = self._rate(attributes["learning_rate_factor"], weight)
        operator, _ = operator_for(self.name, attributes, weight.dtype)
        if self.training_operators and operator is not None:
            return self._training_operator(operator, attributes, rate, count, gradient, olds)
        if self.name == "SGDOptimizer":
            return self._sgd(attributes, rate, gradient, weight, slots)
        return self._adam(attributes, rate, count, gradient, weight, slots)

    def _training_operator(
        self,
        op_type: str,
        a: Mapping[str, Any],
        rate: ir.Value,
        count: ir.Value,
        gradient: ir.Value,
        olds: list[ir.Value],
    ) -> list[ir.Value]:
        """The operator of ai.onnx.preview.training that means the same. Its attributes are float32."""
        attributes: dict[str, float | str] = {"norm_coefficient": float(a["lambda"])}
        if op_type == "Momentum":
            mode = "nesterov" if a["nesterov"] else "standard"
            attributes |= {"alpha": float(a["momentum"]), "beta": 1.0, "mode": mode}
            count = self.updates_before
        else:
            attributes |= {"alpha": float(a["alpha"]), "beta": float(a["beta"]), "epsilon": float(a["epsilon"])}
            if not a["do_bias_correction"]:
                count = self._uncorrected_count()
        outputs = [ir.Value(name=self.writer.unique(f"update/{op_type.lower()}_{old.name}")) for old in olds]
        node = ir.node(
            op_type,
            [rate, count, olds[0], gradient, *olds[1:]],
            attributes,
            domain=TRAINING_DOMAIN,
            outputs=outputs,
            name=self.writer.unique_node_name(f"update/{op_type.lower()}_{olds[0].name}"),
        )
        self.writer.graph.append(node)
        for output in outputs:
            output.shape = olds[0].shape
        return [self._typed(output, olds[0].dtype) for output in outputs]

    def _uncorrected_count(self) -> ir.Value:
        """The update count for which the standard's Adam corrects nothing."""
        if ("uncorrected count",) not in self.shared:
            self.shared["uncorrected count",] = self.writer.constant(0, "uncorrected_count")
        return self.shared["uncorrected count",]

    def _sgd(
        self, a: Mapping[str, Any], rate: ir.Value, gradient: ir.Value, weight: ir.Value, slots: list[ir.Value]
    ) -> list[ir.Value]:
        """torch.optim.SGD, whose momentum begins as zeros."""
        gradient = self._add_scaled(gradient, weight, a["lambda"])
        if not slots:
            return [self._subtract(weight, rate, gradient)]
        momentum = self._add_scaled(gradient, slots[0], a["momentum"])
        direction = self._add_scaled(gradient, momentum, a["momentum"]) if a["nesterov"] else momentum
        return [self._subtract(weight, rate, direction), momentum]

    def _adam(
        self,
        a: Mapping[str, Any],
        rate: ir.Value,
        count: ir.Value,
        gradient: ir.Value,
        weight: ir.Value,
        slots: list[ir.Value],
    ) -> list[ir.Value]:
        """Adam (Kingma & Ba 2015), AdamW (Loshchilov & Hutter 2019) and LAMB (You et al. 2020), as in training."""
        if self.name == "Adam":
            gradient = self._add_scaled(gradient, weight, a["lambda"])
        first = self._blend(slots[0], gradient, a["alpha"])
        second = self._blend(slots[1], self._op("Mul", gradient, gradient), a["beta"])
        mean, spread = first, self._op("Sqrt", second)
        if a["do_bias_correction"]:
            mean = self._op("Div", mean, self._correction(a["alpha"], count, weight))
            spread = self._op("Div", spread, self._op("Sqrt", self._correction(a["beta"], count, weight)))
        direction = self._op("Div", mean, self._op("Add", spread, self._number(a["epsilon"], weight)))
        if self.name == "Lamb":
            direction = self._add_scaled(direction, weight, a["lambda"])
            rate = self._op("Mul", rate, self._trust_ratio(a, weight, direction))
        elif self.name == "AdamW" and a["lambda"]:
            decay = self._op("Mul", rate, self._number(a["lambda"], weight))
            weight = self._subtract(weight, decay, weight)
        return [self._subtract(weight, rate, direction), first, second]

    def _trust_ratio(self, a: Mapping[str, Any], weight: ir.Value, direction: ir.Value) -> ir.Value:
        """||weight|| / ||direction|| within its bounds; 1 where either is zero."""
        zero, one = self._number(0.0, weight), self._number(1.0, weight)
        norms = [self._typed(self.writer.apply("ReduceL2", v, keepdims=0), weight.dtype) for v in (weight, direction)]
        ratio = self._op("Div", *norms)
        if a["ratio_min"] is not None:
            ratio = self._op("Max", ratio, self._number(a["ratio_min"], weight))
        if a["ratio_max"] is not None:
            ratio = self._op("Min", ratio, self._number(a["ratio_max"], weight))
        positive = self.writer.apply("And", *(self.writer.apply("Greater", norm, zero) for norm in norms))
        return self._typed(self.writer.apply("Where", positive, ratio, one), weight.dtype)

    def _rate(self, factor: float, weight: ir.Value) -> ir.Value:
        key = ("rate", factor, weight.dtype)
        if key not in self.shared:
            rate = self.like(self.rate, weight)
            self.shared[key] = rate if factor == 1 else self._op("Mul", rate, self._number(factor, weight))
        return self.shared[key]

    def _correction(self, decay: float, count: ir.Value, weight: ir.Value) -> ir.Value:
        """1 - decay**count, in float64: a small difference of numbers close to 1."""
        key = ("correction", decay, weight.dtype)
        if key not in self.shared:
            wide = self._typed(self.writer.cast(count, ir.DataType.DOUBLE), ir.DataType.DOUBLE)
            power = self.writer.apply("Pow", self._number(decay, wide), wide)
            left = self._typed(self.writer.apply("Sub", self._number(1.0, wide), power), ir.DataType.DOUBLE)
            self.shared[key] = self.like(left, weight)
        return self.shared[key]

    def _blend(self, old: ir.Value, new: ir.Value, decay: float) -> ir.Value:
        kept = self._op("Mul", old, self._number(decay, old))
        return self._op("Add", kept, self._op("Mul", new, self._number(1 - decay, old)))

    def _add_scaled(self, value: ir.Value, other: ir.Value, factor: float) -> ir.Value:
        return value if not factor else self._op("Add", value, self._op("Mul", other, self._number(factor, other)))

    def _subtract(self, weight: ir.Value, rate: ir.Value, direction: ir.Value) -> ir.Value:
        return self._op("Sub", weight, self._op("Mul", rate, direction))

    def _number(self, number: float, like: ir.Value) -> ir.Value:
        key = ("number", float(number), like.dtype)
        if key not in self.shared:
            dtype = np.float64 if like.dtype is ir.DataType.DOUBLE else np.float32
            self.shared[key] = self.writer.constant(number, f"number_{number:g}", dtype)
        return self.shared[key]

    def _op(self, op_type: str, *inputs: ir.Value) -> ir.Value:
        """An operator whose result has the type of its inputs."""
        return self._typed(self.writer.apply(op_type, *inputs), inputs[0].dtype)

    @staticmethod
    def _typed(value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        value.type = None if dtype is None else ir.TensorType(dtype)
        return value


def _add_input(model: ir.Model, name: str, dtype: ir.DataType | None, shape: Any) -> ir.Value:
    assert dtype is not None
    _check_free(model, name)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    model.graph.inputs.append(value)
    return value


def _add_output(model: ir.Model, value: ir.Value, name: str, dtype: ir.DataType | None, shape: Any) -> None:
    assert dtype is not None
    _check_free(model, name)
    value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
    model.graph.outputs.append(value)


def _check_free(model: ir.Model, name: str) -> None:
    if any(value.name == name for value in (*model.graph.inputs, *model.graph.outputs)):
        raise ModelError(
            f"the training graph needs the name {name!r} twice: a weight or feature of the model has a name that "
            "is reserved for a gradient, a moment or a result. Rename it in the model."
        )
