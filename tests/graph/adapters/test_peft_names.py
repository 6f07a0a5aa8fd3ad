"""What PEFT calls the tensors of an adapter."""

from __future__ import annotations

import pytest

from onward.graph.adapters.peft_names import peft_keys, peft_module
from onward.graph.adapters.uses import Reading
from onward.graph.weights.names import WeightNames
from tests.graph.adapters.test_adapted import adapted


@pytest.mark.parametrize(
    ("paths", "prefix", "module"),
    [
        ({"w": "model.layers.0.q_proj.weight"}, "", "model.layers.0.q_proj"),
        ({"w": "net.layers.0.q_proj.weight"}, "net.", "layers.0.q_proj"),
        ({"w": "layers.q_proj.weight#2"}, "", "layers.q_proj"),
        ({"w": "layers.q_proj.bias"}, "", ""),
        ({}, "", ""),
        ({"w": "weight"}, "", ""),
    ],
)
def test_modules(paths: dict[str, str], prefix: str, module: str) -> None:
    assert peft_module("w", WeightNames(paths), prefix) == module


def test_keys() -> None:
    assert peft_keys(adapted((4, 4)), "q") == {
        "w.lora_A": "base_model.model.q.lora_A.weight", "w.lora_B": "base_model.model.q.lora_B.weight",
    }  # fmt: skip
    looked_up = peft_keys(adapted((4, 4), reading=Reading.LOOKUP, has_magnitude=True), "e")
    assert list(looked_up.values()) == [
        f"base_model.model.e.{end}" for end in ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
    ]
