"""Gradients that travel in 16 bits and are added in fp32: their errors against sums in float64."""

from __future__ import annotations

import torch
from torch import nn

from onward.parallel.data_parallel import local_part, micro_batch, replicate, rows_of
from onward.parallel.launch.process import start
from onward.parameters.distributed import Distributed
from tests.ranks import run_on_ranks


def mean_in_bf16(zero_stage: int, sum_in_fp32: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of four replicas: the mean gradient of 4,096 weights as it travels in bf16, and in float64 of each of them."""
    distributed = Distributed(
        data_parallel_size=4, zero_stage=zero_stage, reduction_type="bf16", sum_in_fp32=sum_in_fp32,
    )  # fmt: skip
    mesh = start(distributed, "cpu")
    every = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    module = nn.Sequential(nn.Linear(1, 4096, bias=False))
    replica = replicate(module, [(list(module), False)], mesh, distributed, None, True)
    with micro_batch(replica, zero_stage, True):
        (replica(torch.ones(1)) * every[mesh.rank]).sum().backward()
    (weight,) = module.parameters()
    assert weight.grad is not None
    first, last = rows_of(weight, mesh) or (0, 4096)
    return local_part(weight.grad).flatten().double(), every[:, first:last].double()


def errors_in_bf16() -> dict[str, float]:
    """The largest errors in roundings of bf16 (2^-8): of the mean size of what is added, and of their mean."""
    found = {}
    for zero_stage in (0, 2):
        for sum_in_fp32 in (False, True):
            mean, every = mean_in_bf16(zero_stage, sum_in_fp32)
            exact, size = every.mean(0), every.abs().mean(0)
            last = exact.abs() if zero_stage == 0 else 0.0  # the mean travels back, too
            found[f"{zero_stage} {sum_in_fp32}"] = float(((mean - exact).abs() / (size + last)).max() * 2**8)
    return found


def test_sums_in_fp32_round_each_gradient_once_and_their_mean_once() -> None:
    for found in run_on_ranks(4, errors_in_bf16):
        assert all(found[f"{zero_stage} True"] <= 1 for zero_stage in (0, 2)), found
        assert all(found[f"{zero_stage} False"] > 1 for zero_stage in (0, 2)), found
