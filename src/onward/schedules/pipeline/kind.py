"""What onward knows of a pipeline's schedule: one frozen value that each file of this folder defines.

The orders are those of torch.distributed.pipelining, so that a timeline that is drawn is the one that will run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onward.schedules.pipeline.actions import Action


@dataclass(frozen=True, kw_only=True)
class PipelineKind:
    """A schedule of a pipeline.

    Attributes:
        name: the value of `distributed.pipeline_schedule`.
        torch_class: of torch.distributed.pipelining, which runs it.
        order: (rank, ranks, micro-batches, stages) -> what the rank computes; waiting is not in it.
        stages_per_rank: exactly so many; None: two or more, as `distributed.stages_per_rank` says.
        bubble_share: (ranks, micro-batches, stages of a rank) -> the bubble that its paper gives for equal stages, as a
            share of the time; None: none is given.
        turns_back: stages go forth and back over the ranks; otherwise round and round.
        splits_backward: gradients of activations are computed first and those of weights later.
        needs_one_for_each_rank: an update needs as many micro-batches as there are ranks.
        takes_groups: micro-batches come in groups of as many as there are ranks.
    """

    name: str
    torch_class: str
    order: Callable[[int, int, int, int], tuple[Action, ...]]
    stages_per_rank: int | None = 1
    bubble_share: Callable[[int, int, int], float] | None = None
    turns_back: bool = False
    splits_backward: bool = False
    needs_one_for_each_rank: bool = False
    takes_groups: bool = False
