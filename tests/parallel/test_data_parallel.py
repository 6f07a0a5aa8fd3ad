"""Two replicas: when their gradients become one, what each holds under ZeRO, and sums over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from onward.lowering.process_groups import sum_over_group
from onward.parallel.data_parallel import (
    add_up,
    average,
    local_part,
    micro_batch,
    offloads,
    replicate,
    reshard,
    rows_of,
)
from onward.parallel.launch.process import Mesh, in_world_of_one, start
from onward.parameters.distributed import Distributed
from tests.ranks import run_on_ranks

BATCHES = torch.tensor([[[1.0, 2.0], [3.0, 5.0]], [[7.0, 11.0], [13.0, 17.0]]])
"""[rank, micro-batch, feature]; the gradient of `module(x).sum()` by its weight is x in every row."""
ROWS = 3


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, ROWS, bias=False))


def gradients(mesh: Mesh, **parameters: Any) -> tuple[list[torch.Tensor], Any]:
    """This rank's gradient of the weight after every micro-batch, and the rows that it holds."""
    wanted = Distributed(data_parallel_size=2, **parameters)
    module = linear()
    (weight,) = module.parameters()
    replica = replicate(module, [(list(module), False)], mesh, wanted, None, True)
    (weight,) = module.parameters()
    found = []
    for index in range(2):
        with micro_batch(replica, wanted.zero_stage, index == 1):
            replica(BATCHES[mesh.rank, index]).sum().backward()
        found.append(torch.zeros(0) if weight.grad is None else local_part(weight.grad).clone())
    return found, rows_of(weight, mesh)


def on_rank() -> dict[str, Any]:
    mesh = start(Distributed(data_parallel_size=2), "cpu")
    found: dict[str, Any] = {f"zero {stage}": gradients(mesh, zero_stage=stage) for stage in range(4)}
    found |= {kind: gradients(mesh, reduction_type=kind) for kind in ("fp16", "bf16")}
    found |= {f"{kind} in fp32": gradients(mesh, reduction_type=kind, sum_in_fp32=True) for kind in ("fp16", "bf16")}
    in_bf16 = {"reduction_type": "bf16", "sum_in_fp32": True}
    found |= {f"zero {stage} in fp32": gradients(mesh, zero_stage=stage, **in_bf16) for stage in range(1, 4)}
    found["adasum"] = gradients(mesh, enable_adasum=True)

    sharded = linear()
    replicate(sharded, [(list(sharded), False)], mesh, Distributed(data_parallel_size=2, zero_stage=2), None, True)
    (weight,) = sharded.parameters()
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        sharded(BATCHES[0, 0])
    (whole,) = sharded.parameters()
    found["gathered"] = whole.detach().clone()
    reshard(sharded)
    (weight,) = sharded.parameters()
    found["after"] = local_part(weight).detach().clone()

    mean, total = [torch.tensor([1.0, 2.0]), torch.tensor(3, dtype=torch.int64)], torch.tensor([[4.0]])
    mean[0] += mesh.rank
    average(mean[:1], mesh.data)
    add_up([mean[1], total], mesh.data)
    found["exchanged"] = [mean[0].tolist(), mean[1].item(), total.tolist()]
    own = torch.tensor([1.0 + mesh.rank], requires_grad=True)
    assert mesh.data is not None
    summed = sum_over_group(own, mesh.data.group_name)
    (summed * (10.0 if mesh.rank else 1.0)).sum().backward()
    assert own.grad is not None
    found["sum"] = (summed.item(), own.grad.item())
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(2, on_rank)


MEAN = BATCHES.sum(1).mean(0)


@pytest.mark.parametrize("kind", ["zero 0", "fp16", "bf16", "fp16 in fp32", "bf16 in fp32"])
def test_replicas_have_the_mean_after_the_last_micro_batch_and_their_own_before(ranks: Any, kind: str) -> None:
    """Every number here is one that 16 bits hold exactly."""
    for rank, found in enumerate(ranks):
        (first, last), rows = found[kind]
        assert rows is None
        torch.testing.assert_close(first, BATCHES[rank, 0].expand(ROWS, 2))
        torch.testing.assert_close(last, MEAN.expand(ROWS, 2))


def test_with_adasum_gradients_stay_a_replicas_own(ranks: Any) -> None:
    for rank, found in enumerate(ranks):
        assert torch.equal(found["adasum"][0][1], BATCHES[rank].sum(0).expand(ROWS, 2))


@pytest.mark.parametrize("sums", ["", " in fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_shares_out_rows(ranks: Any, stage: int, sums: str) -> None:
    """Three rows: two for the first replica, one for the second. Stages 2 and 3 reduce with every micro-batch."""
    for rank, found in enumerate(ranks):
        (first, last), rows = found[f"zero {stage}{sums}"]
        assert rows == ((0, 2), (2, 3))[rank]
        torch.testing.assert_close(last, MEAN.expand(2 - rank, 2))
        if stage == 1:
            assert first.numel() == 0
        else:
            torch.testing.assert_close(first, BATCHES[:, 0].mean(0).expand(2 - rank, 2))


def test_weights_gathered_by_a_pass_stay_until_they_are_let_go(ranks: Any) -> None:
    (whole,) = linear().parameters()
    for rank, found in enumerate(ranks):
        assert torch.equal(found["gathered"], whole)
        assert torch.equal(found["after"], whole[2 * rank : 2 + rank])


def test_means_and_sums(ranks: Any) -> None:
    assert [found["exchanged"] for found in ranks] == [[[1.5, 2.5], 6, [[8.0]]]] * 2
    # d(1 * s + 10 * s)/d(own) = 11 on both, s = 1 + 2.
    assert [found["sum"] for found in ranks] == [(3.0, 11.0)] * 2


def test_alone_nothing_is_wrapped_or_exchanged() -> None:
    mesh, module, parameters = in_world_of_one(), linear(), Distributed()
    assert replicate(module, [(list(module), False)], mesh, parameters, None, True) is module
    tensor = torch.tensor([3.0])
    average([tensor], None)
    add_up([tensor], None)
    assert tensor.tolist() == [3.0]
    assert rows_of(tensor, mesh) is None
    assert local_part(tensor) is tensor
    assert not offloads(Distributed(zero_offload_to_cpu=True), mesh)
