"""The checks of one found file: against ONNX Runtime, against float64, before and after training, and after export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

import onward
from benchmarks.found_models_init import init_and_train
from benchmarks.found_models_inputs import Array, make_inputs, open_session
from benchmarks.found_models_objective import Objective, choose_objective
from benchmarks.found_models_reference import in_float64, node_by_node, step_of_rounding
from benchmarks.found_models_row import TOLERANCE, Outcome
from onward.lowering.inspection import describe
from onward.lowering.module import OnnxModule

UPDATES = 30
RATES = (1e-4, 1e-3, 1e-5)
"""Tried in turn: what suits a wake word of 10,000 parameters is too much for a ResNet-50 that is done training."""


class Checks:
    """One file; what a check finds out, the next ones use."""

    def __init__(self, model: Path, file: str, scratch: Path) -> None:
        self.model, self.file, self.scratch = model, file, scratch
        self.inputs: dict[str, Array] = {}
        self.outputs: list[Array] = []
        self.net: OnnxModule

    def inspect(self) -> Outcome:
        """`onward inspect`, and how many parameters it says are trainable."""
        text = describe(self.model)
        found = re.search(r"^(Trainable weights|Weights).*$", text, re.MULTILINE)
        return Outcome(True, found[0] if found else text.splitlines()[0])

    def run_in_onnxruntime(self) -> Outcome:
        session = open_session(self.model)
        self.inputs = make_inputs(session, self.file)
        self.outputs = session.run(None, self.inputs)
        return Outcome(True, ", ".join(f"{name} {list(value.shape)}" for name, value in self.inputs.items()))

    def load(self) -> Outcome:
        self.net = onward.to_torch(self.model)
        count = sum(weight.numel() for weight in self.net.weights.values())
        return Outcome(True, f"{count:,}", f"{len(self.net.weights)} trainable weights")

    def compare_outputs(self) -> Outcome:
        """The file in onward against the same file in ONNX Runtime."""
        return self._compare(self.model, self._compute(self.net))

    def _compare(self, path: Path, ours: list[Array]) -> Outcome:
        """Against ONNX Runtime as it comes, without its optimizations, by node where values are rounded, in float64."""
        worst = largest_difference(open_session(path).run(None, self.inputs), ours)
        if worst <= TOLERANCE:
            return Outcome(True, f"{worst:.0e}")
        plain = open_session(path, optimize=False).run(None, self.inputs)
        unoptimized = largest_difference(plain, ours)
        if unoptimized <= TOLERANCE:
            return Outcome(True, f"{unoptimized:.0e}", f"against ORT unoptimized; its optimizations change {worst:.0e}")
        step, why = step_of_rounding(path)
        if step:
            again = self._difference_when_loaded(path, ours)
            difference, node = node_by_node(path, self.inputs)
            remark = f"by node, the largest at {node}; end to end {unoptimized:.0e}, since {why}"
            return Outcome(again <= TOLERANCE and difference <= step, f"{difference:.0e}", remark)
        exact = in_float64(path, self.inputs)
        mine, theirs = largest_difference(exact, ours), largest_difference(exact, plain)
        remark = f"from float64, from which ORT is off by {theirs:.0e}; between the two {unoptimized:.0e}"
        return Outcome(mine <= max(TOLERANCE, theirs), f"{mine:.0e}", remark)

    def _difference_when_loaded(self, path: Path, ours: list[Array]) -> float:
        """Of the outputs of a file and the net; of fp16 files that trained in fp32, of the rounded weights."""
        loaded = onward.to_torch(path)
        weights = self.net.weights
        if all(loaded.weights[name].dtype == weight.dtype for name, weight in weights.items()):
            return largest_difference(self._compute(loaded), ours)
        pairs = [(loaded.weights[name].detach(), weight.detach()) for name, weight in weights.items()]
        return largest_difference(
            [one.float().numpy() for one, _ in pairs], [other.to(one.dtype).float().numpy() for one, other in pairs]
        )

    def _compute(self, net: OnnxModule) -> list[Array]:
        with torch.no_grad():
            values = net(*(torch.from_numpy(value) for value in self.inputs.values()))
        return [value.numpy() for value in (values if isinstance(values, tuple) else (values,))]

    def train(self) -> Outcome:
        """Updates of Adam on a fixed batch lower the loss there."""
        if not self.net.weights:
            return Outcome(None, "no trainable weights")
        objective = choose_objective(self.outputs, [value.name for value in self.net.graph.model.graph.outputs])  # type: ignore[misc]
        if objective is None:
            return Outcome(None, "no floating-point output")
        if any(weight.dtype == torch.float16 for weight in self.net.weights.values()):
            # As the warning of to_torch says: fp16 weights are trained as fp32 ones, and exported as fp16 again.
            self.net = onward.to_torch(self.model, dtype=torch.float32)
        start = {name: weight.detach().clone() for name, weight in self.net.weights.items()}
        tried = []
        for rate in RATES:
            before, after = self._update(objective, rate)
            what = f"{objective.kind}, output {objective.output}"
            tried.append(f"{before:.3g} to {after:.3g} at {rate:g}")
            if after < before and np.isfinite(after):
                return Outcome(True, f"{before:.3g} to {after:.3g}", f"{what}, Adam at {rate:g}")
            with torch.no_grad():
                for name, weight in self.net.weights.items():
                    weight.copy_(start[name])
        return Outcome(False, tried[0].partition(" at ")[0], f"{what}, Adam: {'; '.join(tried)}")

    def _update(self, objective: Objective, rate: float) -> tuple[float, float]:
        net, batch = self.net, [torch.from_numpy(value) for value in self.inputs.values()]
        optimizer = torch.optim.Adam(net.weights.values(), lr=rate)

        def loss() -> torch.Tensor:
            values = net(*batch)
            return objective.loss(values if isinstance(values, tuple) else (values,))

        with torch.no_grad():
            before = float(loss())
        for _ in range(UPDATES):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        with torch.no_grad():
            return before, float(loss())

    def compare_export(self) -> Outcome:
        """The exported file in ONNX Runtime equals the trained net."""
        path = self.scratch / "trained.onnx"
        onward.export(self.net, path)
        return self._compare(path, self._compute(self.net))

    def init_and_train(self) -> Outcome:
        return init_and_train(self.model, self.file, self.scratch)


def largest_difference(expected: list[Array], actual: list[Array]) -> float:
    """Of all outputs, the largest difference relative to the output's largest magnitude, at least 1; inf: not alike."""
    worst = 0.0
    for one, other in zip(expected, actual, strict=True):
        if not isinstance(one, np.ndarray):
            continue  # type: ignore[unreachable]
        if one.shape != np.shape(other):
            return float("inf")
        if one.dtype.kind != "f":
            worst = max(worst, 0.0 if np.array_equal(one, other) else float("inf"))
            continue
        a, b = _wide(one), _wide(other)
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return float("inf")
        finite = np.isfinite(a)
        if finite.any():
            scale = max(1.0, float(np.abs(a[finite]).max()))
            worst = max(worst, float(np.abs(a[finite] - b[finite]).max()) / scale)
    return worst


def _wide(value: Any) -> Array:
    return np.asarray(value).astype(np.float64)
