"""The section `pruning` of RUN.yaml: weights set to zero on a schedule, exactly and for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from onward.parameters.field_types import STRICT, Count, ShareBelowOne

if TYPE_CHECKING:
    from onward.parameters import Parameters


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """Weights that are set to zero while the rest is trained; a weight that is pruned stays zero.

    Attributes:
        pattern: `magnitude`: the smallest elements of each weight; `2:4`: the two smallest of each four neighbors that
            are summed over, for sparse tensor cores; absent: nothing is pruned.
        sparsity: of `magnitude`: the share of zeros in the end.
        initial_sparsity: of `magnitude`: the share at `start_update`.
        start_update: the weight update after which pruning begins.
        end_update: the one after which `sparsity` is reached; absent: `start_update`. In between the share is
            `sparsity + (initial_sparsity - sparsity) * (1 - t)^3`, t from 0 to 1 (Zhu and Gupta, arXiv:1710.01878).
        every_updates: prune after every so many updates, counted from `start_update`.
        weights: a name or `*`-pattern of initializers or module paths, or several; empty: all that convolutions and
            matmuls read.
    """

    __pydantic_config__ = STRICT
    pattern: Literal["magnitude", "2:4"] | None = None
    sparsity: ShareBelowOne | None = None
    initial_sparsity: ShareBelowOne = 0.0
    start_update: Count = 1
    end_update: Count | None = None
    every_updates: Count = 1
    weights: tuple[str, ...] = ()

    @pydantic.field_validator("pattern", mode="before")
    @classmethod
    def _pattern(cls, value: Any) -> Any:
        """YAML takes 2:4 for a number to the base of 60."""
        return "2:4" if value == 2 * 60 + 4 and not isinstance(value, bool) else value


def pruning_problems(parameters: Parameters) -> list[str]:
    """What is wrong with these fields in combination, one sentence each."""
    asked, training = parameters.pruning, parameters.training
    if asked.pattern is None:
        return []
    problems = []
    if asked.pattern == "magnitude" and asked.sparsity is None:
        problems.append("pruning.sparsity is missing; pruning.pattern magnitude needs the share of zeros, such as 0.8.")
    if asked.sparsity is not None and asked.sparsity < asked.initial_sparsity:
        problems.append(
            f"pruning.initial_sparsity is {asked.initial_sparsity:g}, above pruning.sparsity, which is "
            f"{asked.sparsity:g}; what is pruned stays zero."
        )
    if parameters.adapter.rank is not None and not parameters.adapter.train_too:
        problems.append(
            f"pruning.pattern is {asked.pattern} and adapter.rank is {parameters.adapter.rank}; adapters leave the "
            "weights that would be pruned as they are. Remove one of the two, or name weights to train and prune in "
            "adapter.train_too."
        )
    end = asked.start_update if asked.end_update is None else asked.end_update
    if end < asked.start_update:
        problems.append(
            f"pruning.end_update is {end}, before pruning.start_update, which is {asked.start_update}; set a later one."
        )
    updates = None if training.known_steps is None else training.known_steps // training.gradient_accumulation_steps
    if updates is not None and not parameters.next_rounds and end > updates:
        name = "start_update" if asked.end_update is None else "end_update"
        problems.append(f"pruning.{name} is {end}, but the run has {updates} updates; set {updates} or less.")
    return problems
