"""Rows of the text of a plan."""

from __future__ import annotations

from onward.plan.report.text import in_successive_rows


def test_weights_that_are_called_alike_are_in_successive_rows() -> None:
    """Adapters alternate between two names, and have other shapes from layer to layer."""
    met = [("lora_A", (4, 16)), ("lora_B", (48, 4)), ("lora_B", (16, 4)), ("bias", (16,)), ("lora_A", (4, 64))]
    assert [group[:2] for group in in_successive_rows([(*group, "unsharded", "-") for group in met])] == [
        ("lora_A", (4, 16)), ("lora_A", (4, 64)), ("lora_B", (48, 4)), ("lora_B", (16, 4)), ("bias", (16,)),
    ]  # fmt: skip
