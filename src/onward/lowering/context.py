"""What operators must know of the run in addition to their inputs: a value that is bound when a program is lowered.

Two networks of different contexts can train side by side in one process, on any of autograd's threads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExecutionContext:
    """The settings of a run that change how operators compute; a group is given by the name that torch has for it.

    Attributes:
        channels_last_images: images are convolved with the channels of a pixel side by side, where that is faster.
        replica_group: the replicas over which statistics of a batch are computed; "": each has its own.
        data_group: the replicas whose samples a loss compares with each other; "": there are none.
        expert_group: the replicas that share the experts of every layer; "": each has all of them.
        horizontal_group: the ranks that share the operators of a graph; "": there are none.
        context_group: the ranks that share sequences; "": there are none.
        context_rank: which of them this is.
    """

    channels_last_images: bool = True
    replica_group: str = ""
    data_group: str = ""
    expert_group: str = ""
    horizontal_group: str = ""
    context_group: str = ""
    context_rank: int = 0


USUAL = ExecutionContext()
"""A network that is alone."""
