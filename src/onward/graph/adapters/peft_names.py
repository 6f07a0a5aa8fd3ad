"""What PEFT calls the tensors of an adapter: after the module of the weight, as the original network has it."""

from __future__ import annotations

import re

from onward.graph.adapters.adapted import AdaptedWeight
from onward.graph.adapters.uses import Reading
from onward.graph.weights.names import WeightNames

PREFIX = "base_model.model."
"""In front of every key of a PEFT file."""


def peft_module(weight: str, known_as: WeightNames, prefix: str = "") -> str:
    """The module of a weight in the original network, or "" where its path does not end in `weight`.

    Args:
        weight: name of the initializer.
        known_as: module paths.
        prefix: what paths in the ONNX file have in front.
    """
    path = re.sub(r"#\d+$", "", known_as.paths.get(weight, weight))
    module, _, leaf = path.rpartition(".")
    return module.removeprefix(prefix) if leaf == "weight" else ""


def peft_keys(adapted: AdaptedWeight, module: str) -> dict[str, str]:
    """Name of each tensor of an adapter -> its key in a PEFT file."""
    if adapted.reading is Reading.LOOKUP:
        ends = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
    else:
        ends = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
    names = (adapted.a, adapted.b, adapted.magnitude)
    return {name: f"{PREFIX}{module}.{end}" for name, end in zip(names, ends, strict=True) if name in adapted.names}
