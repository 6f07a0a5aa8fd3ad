"""Gradients by finite differences in float64: of the standard's own cases at every version, and of supplements."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch

from onward.lowering import registry
from onward.lowering.registry import all_lowerings
from tests.conformance.gradients import check_all, load_checks
from tests.conformance.without_gradient import NOT_DOUBLE, NUMBERS, WITHOUT_GRADIENT

LEAST_COMBINATIONS = 1_500
"""(operator, version, attributes) whose gradients are checked; the README states the count."""

OWN_TESTS = ("onward.classical", "onward.fused", "onward.parallel")
"""Domains of onward's own: gradients of what classical models become are compared with finite differences in
onnxruntime (tests/lowering/ops/test_classical.py), of fusions with the unfused graph (tests/graph/fusion), of tensor
parallelism with one process (tests/parallel)."""


def assert_all_accounted_for(lowerings: Collection[tuple[str, str, int]]) -> None:
    missing = [
        f"{one.op_type}-{one.since} of {one.domain or 'ai.onnx'}"
        for one in all_lowerings()
        if one.domain not in OWN_TESTS
        and (one.domain, one.op_type) not in WITHOUT_GRADIENT
        and (one.domain, one.op_type, one.since) not in lowerings
    ]
    assert not missing, f"neither a check nor a reason: {', '.join(missing)}"


def test_every_lowering_has_a_check_or_a_reason() -> None:
    assert_all_accounted_for({one.lowering for one in load_checks()})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_gradients_equal_finite_differences() -> None:
    """All checks pass, and of every lowering at least one differentiates."""
    result = check_all()
    assert not result.failed, "\n".join(f"{name}: {error}" for name, error in result.failed.items())
    assert_all_accounted_for(result.lowerings)
    assert len(result.checked) >= LEAST_COMBINATIONS


def test_reasons_are_of_operators_that_are_lowered() -> None:
    lowered = {(one.domain, one.op_type) for one in all_lowerings()}
    assert not set(WITHOUT_GRADIENT) - lowered
    assert not {(domain, op_type) for domain, op_type, _ in NUMBERS} - lowered


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    all_lowerings()  # registers them
    versions = {
        since: replace(one, function=lambda input: torch.tanh(input.detach()) + input)
        for since, one in registry._on_device["", "Tanh"].items()
    }
    monkeypatch.setitem(registry._on_device, ("", "Tanh"), versions)
    assert "test_tanh" in check_all("test_tanh").failed


def test_checks_are_of_every_kind() -> None:
    names = {one.name for one in load_checks("softmax")}
    assert {"test_softmax_axis_0", "test_softmax_axis_0-11"} <= names
    assert NOT_DOUBLE
