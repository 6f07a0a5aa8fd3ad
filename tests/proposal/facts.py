"""Facts about models and data, made without files: what proposals are made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from onward.proposal.data_facts import WORDS, Feature
from onward.proposal.initialization import Origin
from onward.proposal.model_facts import ModelFacts, Port
from onward.proposal.proposal import Choice, Proposal


def port(name: str, *shape: int | str, dtype: str = "float32") -> Port:
    """An input or output; its batch axis is open."""
    return Port(name, dtype, ("batch", *shape))


def model(inputs: tuple[Port, ...], outputs: tuple[Port, ...], is_trained: bool = True, **given: Any) -> ModelFacts:
    names = tuple(one.name for one in inputs)
    fields: dict[str, Any] = {
        "path": Path("net.onnx"), "ends_in": {}, "before_selection": {}, "operators": {}, "weights": {"w": (4, 3)},
        "needed": {one.name: names for one in outputs}, "frozen": {}, "tables": {}, "positions": None,
        "origin": Origin(is_trained, "its numbers"), "scaled_inputs": frozenset(), "value_names": frozenset(),
    }  # fmt: skip
    return ModelFacts(inputs=inputs, outputs=outputs, **{**fields, **given})


def feature(name: str, values: Any, dtype: str = "") -> Feature:
    """A feature with all of its values."""
    array = np.asarray(values)
    return Feature(name=name, dtype=dtype or str(array.dtype), shape=array.shape[1:], values=array)


def words(name: str, *found: str) -> Feature:
    return Feature(name=name, dtype=WORDS, shape=(), words=found)


def proposal(*choices: Choice, **given: Any) -> Proposal:
    return Proposal(model=Path("net.onnx"), data=None, task="classification", choices=choices, **given)
