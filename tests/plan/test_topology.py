from __future__ import annotations

import pytest

from onward.errors import ParametersError
from onward.parameters.distributed import Distributed
from onward.plan.topology import Place, Topology


def test_ranks_run_horizontally_first_then_over_replicas_then_over_stages() -> None:
    topology = Topology(data_size=3, horizontal_size=2, pipeline_size=2)
    places = [topology.place(rank) for rank in range(topology.world_size)]
    expected = [Place(d, h, p) for p in range(2) for d in range(3) for h in range(2)]
    assert places == expected
    assert [topology.rank(place) for place in places] == list(range(12))


def test_groups_partition_the_ranks() -> None:
    topology = Topology(data_size=3, horizontal_size=2, pipeline_size=2)
    assert topology.horizontal_groups()[0] == (0, 1)
    assert topology.data_groups()[0] == (0, 2, 4)
    assert topology.pipeline_groups()[0] == (0, 6)
    for groups in (topology.data_groups(), topology.horizontal_groups(), topology.pipeline_groups()):
        assert sorted(rank for group in groups for rank in group) == list(range(12))


def test_a_product_that_is_not_the_number_of_processes_is_refused() -> None:
    asked = Distributed(data_parallel_size=2, horizontal_parallel_size=3)
    with pytest.raises(ParametersError, match=r"2 \* horizontal_parallel_size 3 \* .* = 6, but there are 4 processes"):
        Topology.of(asked, 4)
