"""The formulas of weight updates as ONNX nodes: what training computes, in operators of the standard."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.artifacts.torch_class_formulas import ClassUpdate, slots_of_class, update_of_class
from onward.artifacts.update_arithmetic import UpdateArithmetic
from onward.graph.reading.differentiated import TRAINING_DOMAIN
from onward.optim.muon import COEFFICIENTS, ITERATIONS, LEAST_NORM
from onward.optim.torch_class import options_of_torch_class

SMALLEST = float(np.finfo(np.float32).tiny)
"""Before the first learning rate above 0, 0 is divided by it."""


def shapes_of_slots(name: str, attributes: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The moments of an optimizer for a weight: names in a checkpoint, and their shapes."""
    if name.startswith("torch."):
        return slots_of_class(name, options_of_torch_class(name, attributes["options"]), shape)
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
    if name.startswith("torch."):
        return None, f"{name} is written with all options of torch's"
    if name not in ("Adam", "AdamW"):
        return None, f"the standard has no {name}"
    if name == "AdamW" and attributes["lambda"]:
        return None, "the decay of the standard's Adam is not scaled by the learning rate, AdamW's is"
    if attributes["do_bias_correction"] and attributes["epsilon"]:
        return None, "the standard's Adam adds epsilon to the uncorrected second moment, torch's to the corrected one"
    return "Adam", ""


@dataclass(kw_only=True)
class UpdateWriter(UpdateArithmetic):
    """Writes the update of one weight after the other, numbers that several of them need only once.

    Computes in float32, float64 weights in float64.
    """

    name: str
    training_operators: bool

    def apply(
        self, attributes: Mapping[str, Any], count: ir.Value, gradient: ir.Value, olds: list[ir.Value]
    ) -> list[ir.Value]:
        """The new weight and moments of [weight, moments]."""
        weight, *slots = olds
        rate = self.rate_of(attributes["learning_rate_factor"], weight)
        operator, _ = operator_for(self.name, attributes, weight.dtype)
        if self.training_operators and operator is not None:
            return self._training_operator(operator, attributes, rate, count, gradient, olds)
        if self.name.startswith("torch."):
            update = ClassUpdate(
                writer=self,
                options=options_of_torch_class(self.name, attributes["options"]),
                rate=rate,
                factor=attributes["learning_rate_factor"],
                count=self.like(count, weight),
                before=self.like(self.updates_before, weight),
                weight=weight,
                gradient=gradient,
                slots=slots,
            )
            return update_of_class(self.name, update)
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
        return [self.typed(output, olds[0].dtype) for output in outputs]

    def _uncorrected_count(self) -> ir.Value:
        """The update count for which the standard's Adam corrects nothing."""
        if ("uncorrected count",) not in self.shared:
            self.shared["uncorrected count",] = self.writer.constant(0, "uncorrected_count")
        return self.shared["uncorrected count",]

    def _sgd(
        self, a: Mapping[str, Any], rate: ir.Value, gradient: ir.Value, weight: ir.Value, slots: list[ir.Value]
    ) -> list[ir.Value]:
        """torch.optim.SGD, whose momentum begins as zeros."""
        gradient = self.add_scaled(gradient, weight, a["lambda"])
        if not slots:
            return [self.subtract(weight, rate, gradient)]
        momentum = self.add_scaled(gradient, slots[0], a["momentum"])
        direction = self.add_scaled(gradient, momentum, a["momentum"]) if a["nesterov"] else momentum
        return [self.subtract(weight, rate, direction), momentum]

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
            gradient = self.add_scaled(gradient, weight, a["lambda"])
        first = self.blend(slots[0], gradient, a["alpha"])
        second = self.blend(slots[1], self.op("Mul", gradient, gradient), a["beta"])
        # first / c1 / (sqrt(second / c2) + epsilon), with what is one number multiplied before it meets a tensor.
        least, scale = self.number(a["epsilon"], weight), None
        if a["do_bias_correction"]:
            root = self.root_of_correction(a["beta"], count, weight)
            least = self.op("Mul", least, root)
            scale = self.op("Div", root, self.correction(a["alpha"], count, weight))
        direction = self.op("Div", first, self.op("Add", self.op("Sqrt", second), least))
        if self.name == "Lamb":
            direction = direction if scale is None else self.op("Mul", direction, scale)
            direction = self.add_scaled(direction, weight, a["lambda"])
            rate = self.op("Mul", rate, self._trust_ratio(a, weight, direction))
            return [self.subtract(weight, rate, direction), first, second]
        if self.name in ("AdamW", "Muon"):
            weight = self.decayed(weight, rate, a["lambda"])
        length = rate if scale is None else self.op("Mul", rate, scale)
        return [self.subtract(weight, length, direction), first, second]

    def _lion(
        self, a: Mapping[str, Any], rate: ir.Value, gradient: ir.Value, weight: ir.Value, momentum: ir.Value
    ) -> list[ir.Value]:
        """Chen et al. 2023, as in training."""
        move = self.op("Sign", self.blend(momentum, gradient, a["alpha"]))
        new = self.subtract(self.decayed(weight, rate, a["lambda"]), rate, move)
        return [new, self.blend(momentum, gradient, a["beta"])]

    def _muon(
        self, a: Mapping[str, Any], rate: ir.Value, gradient: ir.Value, weight: ir.Value, momentum: ir.Value
    ) -> list[ir.Value]:
        """Jordan et al. 2024, as in training but for the iteration, which is computed in float32, not in bf16."""
        assert weight.shape is not None
        rows, columns = weight.shape.numpy()
        new = self.blend(momentum, gradient, a["momentum"])
        found = self.blend(new, gradient, a["momentum"]) if a["nesterov"] else new
        found = self._turned(found) if rows > columns else found
        norm = self.typed(self.writer.apply("ReduceL2", found, keepdims=0), found.dtype)
        found = self.op("Div", found, self.op("Max", norm, self.number(LEAST_NORM, found)))
        first, second, third = (self.number(number, found) for number in COEFFICIENTS)
        for _ in range(ITERATIONS):
            gram = self.op("MatMul", found, self._turned(found))
            square = self.op("Mul", self.op("MatMul", gram, gram), third)
            both = self.op("Add", self.op("Mul", gram, second), square)
            found = self.op("Add", self.op("Mul", found, first), self.op("MatMul", both, found))
        found = self._turned(found) if rows > columns else found
        length = self.op("Mul", rate, self.number(0.2 * math.sqrt(max(rows, columns)), weight))
        return [self.subtract(self.decayed(weight, rate, a["lambda"]), length, found), new]

    def count_rates(self, largest: ir.Value, squares: ir.Value) -> list[ir.Value]:
        """The largest learning rate, and the sum of its squares, with that of this update, for `_schedule_free`."""
        largest = self.op("Max", largest, self.rate)
        square = self.op("Mul", largest, largest)
        squares = self.op("Add", squares, square)
        share = self.op("Div", square, self.op("Max", squares, self.number(SMALLEST, squares)))
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
        second = self.blend(slots[1], self.op("Mul", gradient, gradient), a["beta"])
        spread = self.op("Sqrt", self.op("Div", second, self.correction(a["beta"], count, weight)))
        move = self.op("Div", gradient, self.op("Add", spread, self.number(a["epsilon"], weight)))
        move = self.op("Mul", rate, self.add_scaled(move, weight, a["lambda"]))
        share = self.like(self.shared["share",], weight)
        # z' = z - move; y' = y + share * offset + (alpha * (1 - share) - 1) * move; the offset is z' - y'.
        step = self.op("Mul", self.op("Sub", self.number(1.0, weight), share), self.number(a["alpha"], weight))
        moved = self.op("Sub", weight, self.op("Sub", move, self.op("Mul", step, move)))
        new = self.op("Add", moved, self.op("Mul", share, slots[0]))
        kept = self.op("Sub", slots[0], self.op("Mul", move, self.number(a["alpha"], weight)))
        return [new, self.op("Sub", kept, self.op("Mul", share, kept)), second]

    def average(self, a: Mapping[str, Any], weight: ir.Value, offset: ir.Value) -> ir.Value:
        """What Schedule-Free evaluates and exports, of a weight and the offset of z from it."""
        return self.add_scaled(weight, offset, 1 - 1 / a["alpha"])

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
        share = self.op("Pow", updates, self.number(a["beta2_decay"], weight))
        square = self.op("Mul", gradient, gradient)
        if len(slots) == 2:
            rows, columns = (self._mean(square, axis) for axis in (-1, -2))
            news = [self._towards(slots[0], rows, share), self._towards(slots[1], columns, share)]
            mean = self.op("Max", self._mean(news[0], -2), self.number(least, weight))
            moment = self.op("Div", self.op("MatMul", *news), mean)
        else:
            moment = self._towards(slots[0], square, share)
            news = [moment]
        moment = self.op("Max", moment, self.number(least * least, weight))
        move = self.op("Div", gradient, self.op("Sqrt", moment))
        size = self.op("Max", self._root_mean_square(weight), self.number(a["min_scale"], weight))
        length = self.op("Min", rate, self.op("Pow", updates, self.number(-0.5, weight)))
        excess = self.op("Div", self._root_mean_square(move), self.number(a["clip_threshold"], weight))
        excess = self.op("Max", excess, self.number(1.0, weight))
        length = self.op("Div", self.op("Mul", size, length), excess)
        return [self.subtract(self.decayed(weight, rate, a["lambda"]), length, move), *news]

    def _turned(self, matrix: ir.Value) -> ir.Value:
        return self.typed(self.writer.apply("Transpose", matrix, perm=[1, 0]), matrix.dtype)

    def _towards(self, old: ir.Value, new: ir.Value, share: ir.Value) -> ir.Value:
        return self.op("Add", old, self.op("Mul", share, self.op("Sub", new, old)))

    def _mean(self, value: ir.Value, axis: int) -> ir.Value:
        axes = self.writer.constant([axis], "axis")
        return self.typed(self.writer.apply("ReduceMean", value, axes, keepdims=1), value.dtype)

    def _root_mean_square(self, value: ir.Value) -> ir.Value:
        squares = self.op("Mul", value, value)
        return self.op("Sqrt", self.typed(self.writer.apply("ReduceMean", squares, keepdims=0), value.dtype))

    def _trust_ratio(self, a: Mapping[str, Any], weight: ir.Value, direction: ir.Value) -> ir.Value:
        """||weight|| / ||direction|| within its bounds; 1 where either is zero."""
        zero, one = self.number(0.0, weight), self.number(1.0, weight)
        norms = [self.typed(self.writer.apply("ReduceL2", v, keepdims=0), weight.dtype) for v in (weight, direction)]
        ratio = self.op("Div", *norms)
        if a["ratio_min"] is not None:
            ratio = self.op("Max", ratio, self.number(a["ratio_min"], weight))
        if a["ratio_max"] is not None:
            ratio = self.op("Min", ratio, self.number(a["ratio_max"], weight))
        positive = self.writer.apply("And", *(self.writer.apply("Greater", norm, zero) for norm in norms))
        return self.typed(self.writer.apply("Where", positive, ratio, one), weight.dtype)
