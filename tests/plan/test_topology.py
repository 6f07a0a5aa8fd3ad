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


def test_ranks_that_share_sequences_are_replicas_in_succession_that_read_the_same_samples() -> None:
    asked = Distributed(data_parallel_size=2, horizontal_parallel_size=2, context_parallel_size=3)
    topology = Topology.of(asked, 12)
    places = [topology.place(rank) for rank in range(12)]
    assert [(topology.reader(place), topology.context(place), place.horizontal) for place in places] == [
        (reader, context, horizontal) for reader in range(2) for context in range(3) for horizontal in range(2)
    ]
    assert topology.context_groups() == ((0, 2, 4), (6, 8, 10), (1, 3, 5), (7, 9, 11))
    assert topology.data_groups() == ((0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11))
    with pytest.raises(ParametersError, match=r"\* context_parallel_size 3 = 12, but there are 4 processes"):
        Topology.of(asked, 4)


def test_a_layout_that_is_still_to_be_chosen_has_no_mesh() -> None:
    with pytest.raises(ParametersError, match=r"layout is auto, which `onward train` replaces by a layout\. Start"):
        Topology.of(Distributed(layout="auto"), 1)


def test_a_product_that_is_not_the_number_of_processes_is_refused() -> None:
    asked = Distributed(data_parallel_size=2, horizontal_parallel_size=3)
    with pytest.raises(ParametersError, match=r"2 \* horizontal_parallel_size 3 \* .* = 6, but there are 4 processes"):
        Topology.of(asked, 4)
