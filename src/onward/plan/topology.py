"""The mesh of ranks: its dimensions, and which place in it a rank has.

Ranks are laid out as the original runner did: horizontal neighbors first, then replicas, then pipeline stages. Of the
replicas, `context_size` in succession read the same samples, each a part of every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from onward.errors import ParametersError
from onward.parameters.distributed import Distributed


@dataclass(frozen=True)
class Place:
    """Where a rank is: its index along each dimension of the mesh; `data` counts the replicas of the weights."""

    data: int
    horizontal: int
    pipeline: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The sizes of the mesh's dimensions: `rank = (pipeline * data_size + data) * horizontal_size + horizontal`.

    Attributes:
        data_size: replicas of the weights: `data_parallel_size * context_parallel_size`.
        horizontal_size: ranks that share the weights of a layer.
        pipeline_size: ranks that share the layers.
        context_size: replicas in succession that share the sequences of the same samples; divides `data_size`.
        zero_group_size: replicas in succession among which ZeRO shards; divides `worker_size`. None: all of a worker.
        replicas_per_worker: replicas in succession that are one worker of local SGD: they reduce gradients at every
            update, and their weights are equal. Divides `data_size`. None: all of them are one.
    """

    data_size: int = 1
    horizontal_size: int = 1
    pipeline_size: int = 1
    context_size: int = 1
    zero_group_size: int | None = None
    replicas_per_worker: int | None = None

    @classmethod
    def of_sizes(cls, distributed: Distributed) -> Topology:
        """The mesh that the fields ask for, whatever the number of processes."""
        return cls(
            data_size=distributed.data_parallel_size * distributed.context_parallel_size,
            horizontal_size=distributed.horizontal_parallel_size,
            pipeline_size=distributed.pipeline_parallel_size,
            context_size=distributed.context_parallel_size,
            zero_group_size=distributed.zero_group_size,
            replicas_per_worker=distributed.worker_size,
        )

    @classmethod
    def of(cls, distributed: Distributed, world_size: int) -> Topology:
        """The mesh of these sizes.

        Raises:
            ParametersError: the product of the sizes is not the number of processes, or they are still to be chosen.
        """
        if distributed.layout == "auto":
            raise ParametersError(
                "distributed.layout is auto, which `onward train` replaces by a layout. Start the run with it, or set "
                "the sizes that `onward plan RUN.yaml --ranks N` prints."
            )
        topology = cls.of_sizes(distributed)
        if topology.world_size != world_size:
            raise ParametersError(
                f"distributed: {distributed.product} = {topology.world_size}, but there are {world_size} processes. "
                "Start as many processes as the product says, or change the sizes."
            )
        return topology

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.data_size * self.horizontal_size * self.pipeline_size

    @property
    def zero_size(self) -> int:
        """Among how many replicas ZeRO shards."""
        return self.zero_group_size or self.worker_size

    @property
    def worker_size(self) -> int:
        """How many replicas are one worker of local SGD; all of them without it."""
        return self.replicas_per_worker or self.data_size

    @property
    def worker_count(self) -> int:
        """How many workers of local SGD there are; 1 without it."""
        return self.data_size // self.worker_size

    @property
    def readers_of_worker(self) -> int:
        """How many of the `reader_count` groups of replicas are of one worker."""
        return self.reader_count // self.worker_count

    def worker(self, place: Place) -> int:
        """To which worker of local SGD a place belongs."""
        return place.data // self.worker_size

    def place_in_worker(self, place: Place) -> Place:
        """The same place with its replica counted inside of its worker."""
        return Place(place.data % self.worker_size, place.horizontal, place.pipeline)

    @property
    def reader_count(self) -> int:
        """How many groups of replicas read samples of their own; as many as replicas without context parallelism."""
        return self.data_size // self.context_size

    def reader(self, place: Place) -> int:
        """Which of the `reader_count` parts of the data is read at a place."""
        return place.data // self.context_size

    def context(self, place: Place) -> int:
        """Which part of every sequence is computed at a place."""
        return place.data % self.context_size

    @property
    def as_text(self) -> str:
        """The sizes: `2 data x 1 tensor x 1 pipeline`."""
        context = f"{self.context_size} context x " if self.context_size > 1 else ""
        workers = f" in {self.worker_count} workers" if self.worker_count > 1 else ""
        sizes = f"{self.reader_count} data x {context}{self.horizontal_size} tensor x {self.pipeline_size} pipeline"
        return sizes + workers

    def place(self, rank: int) -> Place:
        """Where a rank is."""
        rest, horizontal = divmod(rank, self.horizontal_size)
        pipeline, data = divmod(rest, self.data_size)
        return Place(data, horizontal, pipeline)

    def rank(self, place: Place) -> int:
        """Which rank is at a place."""
        return (place.pipeline * self.data_size + place.data) * self.horizontal_size + place.horizontal

    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same shards of the same stage: its replicas; every rank is in one group."""
        return tuple(
            tuple(self.rank(Place(data, horizontal, pipeline)) for data in range(self.data_size))
            for pipeline in range(self.pipeline_size)
            for horizontal in range(self.horizontal_size)
        )

    def context_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share sequences: replicas that read the same samples."""
        return self.successive_replicas(self.context_size)

    def successive_replicas(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Groups of so many replicas in succession."""
        return tuple(group[i : i + size] for group in self.data_groups() for i in range(0, self.data_size, size))

    def spaced_replicas(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Groups of the replicas of a worker at the same place in each of those groups."""
        return tuple(group[i::size] for group in self.successive_replicas(self.worker_size) for i in range(size))

    def worker_groups(self) -> tuple[tuple[int, ...], ...]:
        """All ranks of each worker of local SGD, ascending."""
        found: list[list[int]] = [[] for _ in range(self.worker_count)]
        for rank in range(self.world_size):
            found[self.worker(self.place(rank))].append(rank)
        return tuple(map(tuple, found))

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
