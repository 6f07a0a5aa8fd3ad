"""What contrastive losses need, of the domain `onward.fused`: rows of all replicas to compare one's own rows with."""

from __future__ import annotations

from torch import Tensor

from onward.graph.fusion.rewriting import DOMAIN
from onward.lowering.process_groups import gather_over_group
from onward.lowering.registry import lowers


@lowers("GatherReplicas", domain=DOMAIN)
def gather_replicas(X: Tensor, *, training: bool, data_group: str) -> Tensor:
    """The rows of X of all replicas, its own first; X itself in evaluation, and where there is one replica."""
    return gather_over_group(X, data_group) if training and data_group else X
