"""A loss as a torch function: what does not go with it, each field by its name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from onward.losses.function import FUNCTION
from onward.parameters import Parameters
from onward.parameters.loss import Loss


def problems(function: Any, **sections: Any) -> list[str]:
    mapping = {
        "paths": {"model_path": "m.onnx"}, "loss": {"type": "output", "prediction": "y"},
        "training": {"batch_size": 1, "num_train_steps": 1}, "learning_rate": {"initial_lr": 1.0},
    }  # fmt: skip
    for name, fields in sections.items():
        mapping[name] = {**mapping.get(name, {}), **fields}  # type: ignore[dict-item]
    asked = Parameters.from_mapping(mapping)
    return FUNCTION.find_problems(dataclasses.replace(asked, loss=Loss(type="function", function=function)))


def test_a_function_alone_is_fine() -> None:
    assert problems(lambda y, t: 0) == []
    (missing,) = problems(None)
    assert missing.startswith("loss.type 'function' is for Python: pass loss=Loss(type='function', function=...)")


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("distributed", "pipeline_parallel_size", 2),
        ("distributed", "horizontal_parallel_size", 2),
        ("paths", "model_with_loss_func_path", "a.onnx"),
        ("paths", "optimizer_graph_path", "b.onnx"),
        ("training", "find_batch_size", True),
    ],
)
def test_what_needs_the_loss_in_the_graph_is_named(section: str, field: str, value: Any) -> None:
    extra = {"training": {"gradient_accumulation_steps": 2, "num_train_steps": 2}} if value == 2 else {}
    found = problems(lambda y, t: 0, **{**extra, section: {**extra.get(section, {}), field: value}})
    assert any(f"and {section}.{field} needs the loss in the graph" in one for one in found)
