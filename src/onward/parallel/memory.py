"""How much memory a rank may fill with tensors: what the user says, else most of what its device has free."""

from __future__ import annotations

import torch

from onward.operating_system import free_memory_bytes
from onward.parallel.rendezvous.launcher import ranks_on_this_machine

FREE_SHARE = 0.9
"""Of what is free: allocators round up, and other processes live, too."""


def memory_of_rank(stated_gb: float | None, device: torch.device) -> float:
    """Bytes for the tensors of one rank.

    Args:
        stated_gb: `machine.memory_gb`, in 10^9 bytes; None: most of what is free, of a GPU its own, of a machine's
            memory an equal part for each of the ranks that were started on it.
        device: of the rank.
    """
    if stated_gb is not None:
        return stated_gb * 1e9
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return FREE_SHARE * (free + torch.cuda.memory_reserved(device))
    return FREE_SHARE * free_memory_bytes() / ranks_on_this_machine()
