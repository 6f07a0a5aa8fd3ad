"""What must hold between the fields of `pruning`, and how YAML's 2:4 is read."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from onward.parameters import Parameters
from onward.parameters.pruning import Pruning, pruning_problems


def asked(training: dict[str, Any] | None = None, **pruning: Any) -> list[str]:
    sections = {
        "paths": {"model_path": "m.onnx"}, "loss": {"type": "output", "prediction": "y"},
        "training": {"batch_size": 1, "num_train_steps": 20, **(training or {})}, "learning_rate": {"initial_lr": 1.0},
        "pruning": pruning,
    }  # fmt: skip
    return pruning_problems(Parameters.from_mapping(sections))


@pytest.mark.parametrize(
    ("pruning", "words"),
    [
        ({"pattern": "magnitude"}, "pruning.sparsity is missing; pruning.pattern magnitude needs the share of zeros"),
        (
            {"pattern": "magnitude", "sparsity": 0.2, "initial_sparsity": 0.5},
            "pruning.initial_sparsity is 0.5, above pruning.sparsity, which is 0.2; what is pruned stays zero.",
        ),
        ({"pattern": "2:4", "start_update": 9, "end_update": 5}, "end_update is 5, before pruning.start_update"),
        ({"pattern": "2:4", "start_update": 21}, "pruning.start_update is 21, but the run has 20 updates; set 20 or"),
        ({"pattern": "2:4", "end_update": 30}, "pruning.end_update is 30, but the run has 20 updates"),
    ],
)
def test_one_problem_each(pruning: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match="pruning") as caught:
        asked(**pruning)
    assert words in str(caught.value)


def test_no_problem() -> None:
    assert asked() == []
    assert asked(pattern="magnitude", sparsity=0.0) == []
    assert asked(pattern="2:4", start_update=20) == []
    assert asked({"gradient_accumulation_steps": 4}, pattern="2:4", start_update=5) == []


def test_what_yaml_makes_of_2_4() -> None:
    adapter = pydantic.TypeAdapter(Pruning)
    assert adapter.validate_python({"pattern": 124}).pattern == "2:4"
    for wrong in (True, 125, "4:2"):
        with pytest.raises(pydantic.ValidationError):
            adapter.validate_python({"pattern": wrong})
