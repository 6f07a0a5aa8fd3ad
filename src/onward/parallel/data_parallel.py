"""Replicas: how their gradients become one, and what they shard among each other instead of holding it twice.

torch's `DistributedDataParallel` averages gradients during the backward pass; torch's `fully_shard` also shares out
moments, gradients and weights (the three stages of ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from onward.parallel.launch.process import Mesh
from onward.parallel.reduction import Hook, ReduceScatterInFp32, averaging_in_fp32
from onward.parameters.distributed import Distributed

Units = Sequence[tuple[Sequence[nn.Module], bool]]
REDUCTION_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def replicate(
    module: nn.Module,
    units: Units,
    mesh: Mesh,
    distributed: Distributed,
    dtype: torch.dtype | None,
    uses_all_weights: bool,
    apart: Collection[nn.Parameter] = frozenset(),
) -> nn.Module:
    """Makes a module one of the replicas of its data group; what is to be called from then on.

    Args:
        module: holds the weights of this rank.
        units: its children whose weights ZeRO gathers together, and whether these stay until the backward pass.
        mesh: the ranks.
        distributed: `zero_stage`, `reduction_type`, `sum_in_fp32`, `enable_adasum`, `zero_offload_to_cpu`.
        dtype: of 16-bit computing, in which ZeRO sends weights around; None: their own.
        uses_all_weights: whether every backward pass reaches every weight (control flow may skip some).
        apart: weights that are neither sharded nor reduced here.
    """
    if mesh.data is None or not any(w.requires_grad and w not in apart for w in module.parameters()):
        return module
    if distributed.zero_stage:
        _shard(module, units, mesh, distributed, dtype, apart)
        return module
    if distributed.enable_adasum:
        return module  # gradients are combined once per update: `adasum`
    names = [name for name, weight in module.named_parameters() if weight in apart]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]
    replica = DistributedDataParallel(
        module,
        process_group=mesh.data,
        gradient_as_bucket_view=True,
        find_unused_parameters=not uses_all_weights,
    )
    if distributed.reduction_type != "fp32":
        hooks: dict[str, Hook] = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        hook = hooks[distributed.reduction_type]
        if distributed.sum_in_fp32:
            hook = averaging_in_fp32(REDUCTION_TYPES[distributed.reduction_type])
        # Under its own name DDP lets the bf16 hook pass with NCCL only; Gloo adds up bf16 as well.
        replica.register_comm_hook(mesh.data, lambda group, bucket: hook(group, bucket))
    return replica


def _shard(
    module: nn.Module,
    units: Units,
    mesh: Mesh,
    distributed: Distributed,
    dtype: torch.dtype | None,
    apart: Collection[nn.Parameter],
) -> None:
    assert mesh.device_mesh is not None
    # Operators of a graph change nothing in place; a segment may well end in a view.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # fp32 means no less than fp32: gradients of float64 weights travel as they are.
    sent_dtype = REDUCTION_TYPES[distributed.reduction_type]
    is_plain = dtype is None and distributed.reduction_type == "fp32"
    options: dict[str, Any] = {
        "mesh": mesh.device_mesh["data"] if mesh.zero_mesh is None else mesh.zero_mesh,
        # The weights of stage 3 leave after every pass; those of stages 1 and 2 stay until the update.
        "reshard_after_forward": distributed.zero_stage == 3,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=None if is_plain else torch.float32 if distributed.sum_in_fp32 else sent_dtype,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy() if offloads(distributed, mesh) else OffloadPolicy(),
        "ignored_params": {weight for weight in module.parameters() if weight.dim() == 0 or weight in apart},
    }
    for children, is_kept in units:
        if is_kept:
            fully_shard(list(children), **{**options, "reshard_after_forward": False})
        else:
            fully_shard(list(children), **options)
    fully_shard(module, **{**options, "reshard_after_forward": False})
    if distributed.sum_in_fp32:
        for child in module.modules():
            if isinstance(child, FSDPModule):
                child.set_custom_reduce_scatter(ReduceScatterInFp32(sent_dtype))  # type: ignore[arg-type]


def offloads(distributed: Distributed, mesh: Mesh) -> bool:
    """Whether what replicas shard waits in host memory; on CPUs it is there already."""
    return distributed.zero_offload_to_cpu and mesh.device.type == "cuda"


def micro_batch(module: nn.Module, zero_stage: int, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Around the forward and backward pass of one micro-batch: replicas reduce gradients with the last only.

    ZeRO 2 and 3 hold no full gradients and communicate with each.
    """
    if isinstance(module, FSDPModule):
        # Every backward pass is its own: told that another follows, FSDP2 gathers beyond the first unit of this one.
        module.set_requires_gradient_sync(is_last or zero_stage >= 2)
        module.set_requires_all_reduce(is_last)  # over the groups of ZeRO, where there are several
        module.set_reshard_after_backward(is_last or zero_stage == 3)
    if isinstance(module, DistributedDataParallel) and not is_last:
        return module.no_sync()
    return contextlib.nullcontext()


def reshard(module: nn.Module) -> None:
    """Lets gathered weights go, after passes without a backward pass; nothing without ZeRO."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that is sharded; any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor._local_tensor  # `to_local` would give a view with a history


def rows_of(tensor: torch.Tensor, mesh: Mesh) -> tuple[int, int] | None:
    """The rows [start, stop) along axis 0 that this replica holds; None for a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return None
    rows, size = tensor.shape[0], mesh.topology.zero_size
    chunk = -(-rows // size)
    start = min(chunk * (mesh.place.data % size), rows)
    return start, min(start + chunk, rows)


def average(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Replaces tensors by their means over a group, in place, all in one collective for each type."""
    if group is None or not tensors:
        return
    _all_reduce(tensors, group, divide_by=dist.get_world_size(group))


def add_up(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Replaces tensors by their sums over a group, in place, all in one collective for each type."""
    if group is None or not tensors:
        return
    _all_reduce(tensors, group, divide_by=1)


def _all_reduce(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, divide_by: int) -> None:
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for same in by_type.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.all_reduce(flat, group=group)
        if divide_by != 1:
            flat /= divide_by
        parts = torch.split(flat, [tensor.numel() for tensor in same])
        torch._foreach_copy_(list(same), [part.view_as(t) for part, t in zip(parts, same, strict=True)])
