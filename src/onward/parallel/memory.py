"""How much memory a rank may fill with tensors: what the user says, else most of what its device has free."""

from __future__ import annotations

from pathlib import Path

import torch

from onward.parallel.launcher import detect

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
    return FREE_SHARE * free_memory() / detect().local_size


def free_memory(root: Path = Path("/")) -> float:
    """Bytes that this machine could still give out, or the container that this process lives in."""
    found = []
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    group = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if (group / limit).is_file() and (group / used).is_file():
            text = (group / limit).read_text().strip()
            if text != "max":
                found.append(max(0, int(text) - int((group / used).read_text())))
    return float(min(found))
