"""The section `adapter` of RUN.yaml: low-rank adapters next to frozen weights (LoRA), and what they are written as."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from onward.errors import ParametersError
from onward.parameters.field_types import STRICT, Count, Flag, Positive, ShareBelowOne
from onward.parameters.yaml_file import sentences
from onward.untrusted_files import validated

if TYPE_CHECKING:
    from onward.parameters import Parameters

AdapterOutput = Literal["merged", "peft", "onnx_adapter"]


@dataclass(frozen=True, kw_only=True)
class AdapterRule:
    """Rank and alpha of the weights that match; a later rule wins over an earlier one, field by field.

    Attributes:
        weights: a name or `*`-pattern of initializers or module paths, or several.
        rank: of these weights' adapters.
        alpha: of these weights' adapters.
    """

    __pydantic_config__ = STRICT
    weights: str | tuple[str, ...]
    rank: Count | None = None
    alpha: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Low-rank adapters: the model's weights stay as they are, and two small matrices next to each target are trained.

    Attributes:
        rank: of the two matrices, `<weight>.lora_A` and `<weight>.lora_B`; absent: no adapters, all weights train.
        alpha: their product is multiplied by `alpha / rank`; absent: by 1.
        dropout: fraction of a layer's input that its adapter does not see, in training.
        targets: exact names or `*`-patterns of initializers or module paths of the weights to adapt; empty: the linear
            layers of repeated blocks, which `onward inspect` lists.
        rules: rank and alpha of single weights, each `{weights, rank, alpha}`.
        rslora: multiply by `alpha / sqrt(rank)` instead (rank-stabilized LoRA).
        dora: also train the norm of each output's weights, `<weight>.lora_magnitude` (DoRA).
        start: `kaiming`: lora_A is random as in a linear layer, lora_B zero; `gaussian`: lora_A is normal with the
            deviation `1 / rank`; `pissa`: both begin as the largest singular vectors of the weight, which keeps the
            rest.
        pissa_iterations: iterations of an approximate decomposition for `pissa`, as PEFT's `pissa_niter_16`, which
            takes seconds for large models; absent: the exact one, which takes minutes.
        start_path: a PEFT folder or an `.onnx_adapter` file to begin with instead of `start`.
        learning_rate_ratio: learning rate of lora_B over that of everything else (LoRA+).
        train_too: names or patterns of weights that are trained in full next to the adapters, such as a new head.
        outputs: what is written at the end: `merged`: the model with adapted weights; `peft`: a folder for PEFT;
            `onnx_adapter`: an ONNX Runtime adapter, and the model that takes it.
        module_prefix: what module paths in the ONNX file have in front of those of the original module, left out in
            PEFT folders: `model.` where a wrapper of this name was exported.
    """

    __pydantic_config__ = STRICT
    rank: Count | None = None
    alpha: Positive | None = None
    dropout: ShareBelowOne = 0.0
    targets: tuple[str, ...] = ()
    rules: tuple[AdapterRule, ...] = ()
    rslora: Flag = False
    dora: Flag = False
    start: Literal["kaiming", "gaussian", "pissa"] = "kaiming"
    pissa_iterations: Count | None = None
    start_path: Path | None = None
    learning_rate_ratio: Positive = 1.0
    train_too: tuple[str, ...] = ()
    outputs: tuple[AdapterOutput, ...] = ("merged",)
    module_prefix: str = ""

    def scale(self, rank: int, alpha: float | None) -> float:
        """What the product of the two matrices is multiplied by."""
        return 1.0 if alpha is None else alpha / (math.sqrt(rank) if self.rslora else rank)

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Adapter:
        """The section as RUN.yaml or a checkpoint holds it.

        Raises:
            ParametersError: a field is unknown or impossible.
        """
        try:
            return validated(cls, dict(given))
        except pydantic.ValidationError as error:
            raise ParametersError("\n".join(f"adapter.{line}" for line in sentences(error, cls))) from error


MERGED = Adapter()
"""Of a call that names no section: one model is written, as without adapters."""


def adapter_problems(parameters: Parameters) -> Sequence[str]:
    """What is wrong with the section in combination with others, one sentence each."""
    adapter, training = parameters.adapter, parameters.training
    if adapter.rank is None:
        asked = [one.name for one in dataclasses.fields(adapter) if getattr(adapter, one.name) != one.default]
        return [
            f"adapter.{name} is set, but adapter.rank is missing; set adapter.rank, for example to 8, or remove {name}."
            for name in asked
        ]
    problems = []
    if training.weights_to_train:
        problems.append(
            "training.weights_to_train is set, and so is adapter.rank; name the weights to adapt in adapter.targets, "
            "and those to train in full in adapter.train_too."
        )
    if not adapter.outputs:
        problems.append("adapter.outputs is empty; name at least one of 'merged', 'peft' and 'onnx_adapter'.")
    if adapter.pissa_iterations is not None and adapter.start != "pissa":
        problems.append(
            f"adapter.pissa_iterations is set, but adapter.start is {adapter.start!r}; set start: pissa, or remove "
            "pissa_iterations."
        )
    if adapter.start_path is not None and adapter.start != "kaiming":
        problems.append(
            f"adapter.start is {adapter.start!r}, and adapter.start_path is set; set one of the two: how adapters "
            "begin, or the file that they begin as."
        )
    return problems
