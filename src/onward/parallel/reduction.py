"""Gradients that travel in 16 bits and are added in fp32: every replica adds up its part of them, which others send it.

As many bytes as a ring sends, and two roundings whatever the number of replicas; a ring rounds after each addition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Hook = Callable[[dist.ProcessGroup, Any], torch.futures.Future[torch.Tensor]]


class ReduceScatterInFp32:
    """What `FSDPModule.set_custom_reduce_scatter` takes: tensors of fp32 that travel in another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the tensors of a call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Adds up this rank's part, or averages it, as `op` says."""
        sent = input_tensor.to(self._dtype)
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=group)
        torch.sum(arrived.view(group.size(), -1), 0, dtype=output_tensor.dtype, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


def averaging_in_fp32(dtype: torch.dtype) -> Hook:
    """What `DistributedDataParallel.register_comm_hook` takes: buckets of gradients that travel in a type."""

    def hook(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        ranks = group.size()
        sent = buffer.new_zeros(-(-buffer.numel() // ranks) * ranks, dtype=dtype)
        sent[: buffer.numel()] = buffer
        arrived = torch.empty_like(sent)
        work = dist.all_to_all_single(arrived, sent, group=group, async_op=True)

        def finish(_: Any) -> torch.Tensor:
            own = arrived.view(ranks, -1).sum(0, dtype=buffer.dtype).div_(ranks)
            dist.all_gather(list(sent.chunk(ranks)), own.to(dtype), group=group)
            return buffer.copy_(sent[: buffer.numel()])

        if buffer.is_cuda:
            later: torch.futures.Future[torch.Tensor] = work.get_future().then(finish)
            return later
        # Gloo's futures end in threads of its own, whose collectives would come in another order on every rank.
        work.wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(finish(None))
        return done

    return hook
