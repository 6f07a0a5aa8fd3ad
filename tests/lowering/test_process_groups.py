"""Groups by their names: a sum and a gather over one process, with their gradients; no name is a mistake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from onward.lowering.process_groups import gather_over_group, group_named, largest_of_group, sum_over_group


@pytest.fixture(scope="module")
def group() -> Iterator[str]:
    """The name of a group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield str(dist.group.WORLD.group_name)
    dist.destroy_process_group()


def test_over_one_process_everything_stays(group: str) -> None:
    x = torch.arange(6.0).reshape(3, 2).requires_grad_()
    assert dist.get_world_size(group_named(group)) == 1
    for function in (sum_over_group, gather_over_group):
        found = function(x, group)
        assert torch.equal(found, x)
        (gradient,) = torch.autograd.grad((found * found).sum(), x)
        torch.testing.assert_close(gradient, 2 * x.detach())
    largest = largest_of_group(x.detach(), group)
    assert torch.equal(largest, x)
    assert largest.data_ptr() != x.data_ptr()


def test_without_a_name_there_is_no_group() -> None:
    with pytest.raises(RuntimeError, match="lowered without a process group; give its ExecutionContext"):
        group_named("")
