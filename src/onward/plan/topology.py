"""The mesh of ranks: three dimensions, and which place in it a rank has.

Ranks are laid out as the original runner did: horizontal neighbors first, then replicas, then pipeline stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from onward.errors import ParametersError
from onward.parameters.distributed import Distributed


@dataclass(frozen=True)
class Place:
    """Where a rank is: its index along each dimension of the mesh."""

    data: int
    horizontal: int
    pipeline: int


@dataclass(frozen=True)
class Topology:
    """The sizes of the mesh's dimensions: `rank = (pipeline * data_size + data) * horizontal_size + horizontal`.

    Attributes:
        data_size: replicas, each with its own data.
        horizontal_size: ranks that share the weights of a layer.
        pipeline_size: ranks that share the layers.
    """

    data_size: int = 1
    horizontal_size: int = 1
    pipeline_size: int = 1

    @classmethod
    def of(cls, distributed: Distributed, world_size: int) -> Topology:
        """The mesh of these sizes.

        Raises:
            ParametersError: the product of the sizes is not the number of processes.
        """
        sizes = (
            distributed.data_parallel_size,
            distributed.horizontal_parallel_size,
            distributed.pipeline_parallel_size,
        )
        topology = cls(*sizes)
        if topology.world_size != world_size:
            raise ParametersError(
                f"distributed: data_parallel_size {sizes[0]} * horizontal_parallel_size {sizes[1]} * "
                f"pipeline_parallel_size {sizes[2]} = {topology.world_size}, but there are {world_size} processes. "
                "Start as many processes as the product says, or change the sizes."
            )
        return topology

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.data_size * self.horizontal_size * self.pipeline_size

    def place(self, rank: int) -> Place:
        """Where a rank is."""
        rest, horizontal = divmod(rank, self.horizontal_size)
        pipeline, data = divmod(rest, self.data_size)
        return Place(data, horizontal, pipeline)

    def rank(self, place: Place) -> int:
        """Which rank is at a place."""
        return (place.pipeline * self.data_size + place.data) * self.horizontal_size + place.horizontal

    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same shards of the same stage and read other data; every rank is in one group."""
        return tuple(
            tuple(self.rank(Place(data, horizontal, pipeline)) for data in range(self.data_size))
            for pipeline in range(self.pipeline_size)
            for horizontal in range(self.horizontal_size)
        )

    def horizontal_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share the weights of the same layers and read the same data."""
        return tuple(
            tuple(self.rank(Place(data, horizontal, pipeline)) for horizontal in range(self.horizontal_size))
            for pipeline in range(self.pipeline_size)
            for data in range(self.data_size)
        )

    def pipeline_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that a sample passes through, first stage first."""
        return tuple(
            tuple(self.rank(Place(data, horizontal, pipeline)) for pipeline in range(self.pipeline_size))
            for data in range(self.data_size)
            for horizontal in range(self.horizontal_size)
        )
