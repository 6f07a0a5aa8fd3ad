"""The formulas of weight updates as ONNX nodes: what training computes, in operators of the standard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.reading.differentiated import TRAINING_DOMAIN
from onward.optim.muon import COEFFICIENTS, ITERATIONS, LEAST_NORM

SMALLEST = float(np.finfo(np.float32).tiny)
"""Before the first learning rate above 0, 0 is divided by it."""


def shapes_of_slots(name: str, attributes: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The moments of an optimizer for a weight: names in a checkpoint, and their shapes."""
    if name == "SGDOptimizer":
        return {"momentum_buffer": shape} if attributes["momentum"] else {}
    if name == "Adafactor" and len(shape) > 1:
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
    if name == "Adafactor":
        return {"variance": shape}
    if attributes.get("use_muon"):
        return {"momentum_buffer": shape}
    if name == "AdamWScheduleFree":
        return {"z_offset": shape, "exp_avg_sq": shape}
    return {"exp_avg": shape} if name == "Lion" else {"exp_avg": shape, "exp_avg_sq": shape}


def operator_for(name: str, attributes: Mapping[str, Any], dtype: ir.DataType | None) -> tuple[str | None, str]:
    """The operator of ai.onnx.preview.training that updates a weight just so, or None and why there is none."""
    if dtype is ir.DataType.DOUBLE:
        return None, "the attributes of the standard's operators are float32, the weights float64"
    if name == "SGDOptimizer":
        return ("Momentum", "") if attributes["momentum"] else (None, "without momentum it is one subtraction")
    if name not in ("Adam", "AdamW"):
        return None, f"the standard has no {name}"
    if name == "AdamW" and attributes["lambda"]:
        return None, "the decay of the standard's Adam is not scaled by the learning rate, AdamW's is"
    if attributes["do_bias_correction"] and attributes["epsilon"]:
        return None, "the standard's Adam adds epsilon to the uncorrected second moment, torch's to the corrected one"
    return "Adam", ""


@dataclass(kw_only=True)
class UpdateWriter:
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
        if self.name == "Lion":
            return self._lion(attributes, rate, gradient, weight, slots[0])
        if self.name == "Adafactor":
            return self._adafactor(attributes, rate, count, gradient, weight, slots)
        if attributes.get("use_muon"):
            return self._muon(attributes, rate, gradient, weight, slots[0])
        if self.name == "AdamWScheduleFree":
            return self._schedule_free(attributes, rate, count, gradient, weight, slots)
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
        # first / c1 / (sqrt(second / c2) + epsilon), with what is one number multiplied before it meets a tensor.
        least, scale = self._number(a["epsilon"], weight), None
        if a["do_bias_correction"]:
            root = self._root_of_correction(a["beta"], count, weight)
            least = self._op("Mul", least, root)
            scale = self._op("Div", root, self._correction(a["alpha"], count, weight))
        direction = self._op("Div", first, self._op("Add", self._op("Sqrt", second), least))
        if self.name == "Lamb":
            direction = direction if scale is None else self._op("Mul", direction, scale)
            direction = self._add_scaled(direction, weight, a["lambda"])
            rate = self._op("Mul", rate, self._trust_ratio(a, weight, direction))
            return [self._subtract(weight, rate, direction), first, second]
        if self.name in ("AdamW", "Muon"):
            weight = self._decayed(weight, rate, a["lambda"])
        length = rate if scale is None else self._op("Mul", rate, scale)
        return [self._subtract(weight, length, direction), first, second]

    def _lion(
        self, a: Mapping[str, Any], rate: ir.Value, gradient: ir.Value, weight: ir.Value, momentum: ir.Value
    ) -> list[ir.Value]:
        """Chen et al. 2023, as in training."""
        move = self._op("Sign", self._blend(momentum, gradient, a["alpha"]))
        new = self._subtract(self._decayed(weight, rate, a["lambda"]), rate, move)
        return [new, self._blend(momentum, gradient, a["beta"])]

    def _muon(
        self, a: Mapping[str, Any], rate: ir.Value, gradient: ir.Value, weight: ir.Value, momentum: ir.Value
    ) -> list[ir.Value]:
        """Jordan et al. 2024, as in training but for the iteration, which is computed in float32, not in bf16."""
        assert weight.shape is not None
        rows, columns = weight.shape.numpy()
        new = self._blend(momentum, gradient, a["momentum"])
        found = self._blend(new, gradient, a["momentum"]) if a["nesterov"] else new
        found = self._turned(found) if rows > columns else found
        norm = self._typed(self.writer.apply("ReduceL2", found, keepdims=0), found.dtype)
        found = self._op("Div", found, self._op("Max", norm, self._number(LEAST_NORM, found)))
        first, second, third = (self._number(number, found) for number in COEFFICIENTS)
        for _ in range(ITERATIONS):
            gram = self._op("MatMul", found, self._turned(found))
            square = self._op("Mul", self._op("MatMul", gram, gram), third)
            both = self._op("Add", self._op("Mul", gram, second), square)
            found = self._op("Add", self._op("Mul", found, first), self._op("MatMul", both, found))
        found = self._turned(found) if rows > columns else found
        length = self._op("Mul", rate, self._number(0.2 * math.sqrt(max(rows, columns)), weight))
        return [self._subtract(self._decayed(weight, rate, a["lambda"]), length, found), new]

    def count_rates(self, largest: ir.Value, squares: ir.Value) -> list[ir.Value]:
        """The largest learning rate, and the sum of its squares, with that of this update, for `_schedule_free`."""
        largest = self._op("Max", largest, self.rate)
        square = self._op("Mul", largest, largest)
        squares = self._op("Add", squares, square)
        share = self._op("Div", square, self._op("Max", squares, self._number(SMALLEST, squares)))
        self.shared["share",] = share
        return [largest, squares]

    def _schedule_free(
        self,
        a: Mapping[str, Any],
        rate: ir.Value,
        count: ir.Value,
        gradient: ir.Value,
        weight: ir.Value,
        slots: list[ir.Value],
    ) -> list[ir.Value]:
        """Defazio et al. 2024, as in training, with z as its offset from the weight, which begins as zero."""
        second = self._blend(slots[1], self._op("Mul", gradient, gradient), a["beta"])
        spread = self._op("Sqrt", self._op("Div", second, self._correction(a["beta"], count, weight)))
        move = self._op("Div", gradient, self._op("Add", spread, self._number(a["epsilon"], weight)))
        move = self._op("Mul", rate, self._add_scaled(move, weight, a["lambda"]))
        share = self.like(self.shared["share",], weight)
        # z' = z - move; y' = y + share * offset + (alpha * (1 - share) - 1) * move; the offset is z' - y'.
        step = self._op("Mul", self._op("Sub", self._number(1.0, weight), share), self._number(a["alpha"], weight))
        moved = self._op("Sub", weight, self._op("Sub", move, self._op("Mul", step, move)))
        new = self._op("Add", moved, self._op("Mul", share, slots[0]))
        kept = self._op("Sub", slots[0], self._op("Mul", move, self._number(a["alpha"], weight)))
        return [new, self._op("Sub", kept, self._op("Mul", share, kept)), second]

    def average(self, a: Mapping[str, Any], weight: ir.Value, offset: ir.Value) -> ir.Value:
        """What Schedule-Free evaluates and exports, of a weight and the offset of z from it."""
        return self._add_scaled(weight, offset, 1 - 1 / a["alpha"])

    def _adafactor(
        self,
        a: Mapping[str, Any],
        rate: ir.Value,
        count: ir.Value,
        gradient: ir.Value,
        weight: ir.Value,
        slots: list[ir.Value],
    ) -> list[ir.Value]:
        """Shazeer & Stern 2018, as in training."""
        kind = np.float64 if weight.dtype is ir.DataType.DOUBLE else np.float32
        least = float(np.finfo(kind).eps) if a["epsilon"] is None else a["epsilon"]
        updates = self.like(count, weight)
        share = self._op("Pow", updates, self._number(a["beta2_decay"], weight))
        square = self._op("Mul", gradient, gradient)
        if len(slots) == 2:
            rows, columns = (self._mean(square, axis) for axis in (-1, -2))
            news = [self._towards(slots[0], rows, share), self._towards(slots[1], columns, share)]
            mean = self._op("Max", self._mean(news[0], -2), self._number(least, weight))
            moment = self._op("Div", self._op("MatMul", *news), mean)
        else:
            moment = self._towards(slots[0], square, share)
            news = [moment]
        moment = self._op("Max", moment, self._number(least * least, weight))
        move = self._op("Div", gradient, self._op("Sqrt", moment))
        size = self._op("Max", self._root_mean_square(weight), self._number(a["min_scale"], weight))
        length = self._op("Min", rate, self._op("Pow", updates, self._number(-0.5, weight)))
        excess = self._op("Div", self._root_mean_square(move), self._number(a["clip_threshold"], weight))
        excess = self._op("Max", excess, self._number(1.0, weight))
        length = self._op("Div", self._op("Mul", size, length), excess)
        return [self._subtract(self._decayed(weight, rate, a["lambda"]), length, move), *news]

    def _decayed(self, weight: ir.Value, rate: ir.Value, decay: float) -> ir.Value:
        if not decay:
            return weight
        share = self._op("Mul", rate, self._number(decay, weight))
        return self._op("Mul", weight, self._op("Sub", self._number(1.0, weight), share))

    def _turned(self, matrix: ir.Value) -> ir.Value:
        return self._typed(self.writer.apply("Transpose", matrix, perm=[1, 0]), matrix.dtype)

    def _towards(self, old: ir.Value, new: ir.Value, share: ir.Value) -> ir.Value:
        return self._op("Add", old, self._op("Mul", share, self._op("Sub", new, old)))

    def _mean(self, value: ir.Value, axis: int) -> ir.Value:
        axes = self.writer.constant([axis], "axis")
        return self._typed(self.writer.apply("ReduceMean", value, axes, keepdims=1), value.dtype)

    def _root_mean_square(self, value: ir.Value) -> ir.Value:
        squares = self._op("Mul", value, value)
        return self._op("Sqrt", self._typed(self.writer.apply("ReduceMean", squares, keepdims=0), value.dtype))

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
        """1 - decay**count, a small difference of numbers close to 1.

        In float32 -2 t / (1 - t) with t = tanh(count * log(decay) / 2), which loses no digits; it needs no float64,
        which WebGPU has not.
        """
        key = ("correction", decay, weight.dtype)
        if key not in self.shared and not decay:
            self.shared[key] = self._number(1.0, weight)
        if key not in self.shared:
            updates = self.like(count, weight)
            if weight.dtype is ir.DataType.DOUBLE:
                self.shared[key] = self._op(
                    "Sub", self._number(1.0, weight), self._op("Pow", self._number(decay, weight), updates)
                )
            else:
                tangent = self._op("Tanh", self._op("Mul", updates, self._number(math.log(decay) / 2, weight)))
                rest = self._op("Sub", self._number(1.0, weight), tangent)
                self.shared[key] = self._op("Mul", self._number(-2.0, weight), self._op("Div", tangent, rest))
        return self.shared[key]

    def _root_of_correction(self, decay: float, count: ir.Value, weight: ir.Value) -> ir.Value:
        key = ("root of correction", decay, weight.dtype)
        if key not in self.shared:
            self.shared[key] = self._op("Sqrt", self._correction(decay, count, weight))
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
        """An operator whose result has the type of its inputs, written once for the same inputs, as of rates."""
        key = ("result", op_type, *inputs)
        if key not in self.shared:
            self.shared[key] = self._typed(self.writer.apply(op_type, *inputs), inputs[0].dtype)
        return self.shared[key]

    @staticmethod
    def _typed(value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        value.type = None if dtype is None else ir.TensorType(dtype)
        return value
