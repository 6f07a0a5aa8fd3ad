"""All that changes while a run trains; saving it is a checkpoint, loading it continues as if nothing had happened."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onward.data.batches import DataCursor, resumed_cursor
from onward.engine.local_sgd import OUTER_SLOT, LocalSGD, notes_on_workers
from onward.engine.many_tensors import choose, copy_all
from onward.engine.network.local_weights import LocalWeight
from onward.engine.network.network import Network
from onward.engine.weight_average import OptimizerAverage, WeightAverage
from onward.engine.weight_pruning import WeightPruning
from onward.optim.building import slots_by_name
from onward.optim.loss_scale import LossScale
from onward.optim.schedule_free import AdamWScheduleFree
from onward.optim.schedules import RateAdjustment
from onward.parallel.launch.process import Mesh, in_world_of_one
from onward.parallel.sharded_tensors import ShardedTensor
from onward.parameters import Averaging, Distributed, Pruning
from onward.plan.shards import Sharding


@dataclass(kw_only=True)
class Counters:
    """What has been done so far.

    Attributes:
        step: forward/backward passes in this round.
        round: rounds finished.
        update: weight updates over all rounds, skipped ones included.
        skipped_updates: updates left out because a gradient was not finite, over all rounds.
        samples: training samples consumed in this round.
        ended_early_of: the steps of this round, which a callback ended before all of them were done; 0: none did.
    """

    step: int = 0
    round: int = 0
    update: int = 0
    skipped_updates: int = 0
    samples: int = 0
    ended_early_of: int = 0


Place = tuple[int, int]
"""In the data of a replica: epoch, and samples of it read."""


@dataclass(kw_only=True)
class LossCourse:
    """The course of a run's losses, by which spikes are recognized (`onward.engine.faults.loss_spikes`).

    Attributes:
        losses, log_norms: of the last updates: the largest loss of any replica, the logarithm of the gradient norm.
        rollbacks: returns to a checkpoint because of a spike.
        spans: (begin, end] of this replica's data that are left out.
        first_loss: of the first report of this round; None: there was none yet, or it was not finite.
    """

    losses: list[float] = field(default_factory=list)
    log_norms: list[float] = field(default_factory=list)
    rollbacks: int = 0
    spans: list[tuple[Place, Place]] = field(default_factory=list)
    first_loss: float | None = None

    def add(self, loss: float, log_norm: float, window: int) -> None:
        """Adds an update; of those before, the last ones stay."""
        self.losses = [*self.losses, loss][-window:]
        self.log_norms = [*self.log_norms, log_norm][-window:]


@dataclass(frozen=True)
class _Mark:
    """What changes between two weight updates, as the last update left it."""

    counters: Counters
    cursor: DataCursor
    random: dict[str, torch.Tensor]
    statistics: list[torch.Tensor]


@dataclass(kw_only=True)
class TrainState:
    """Weights and running statistics, moments (in `optimizer`), and everything that counts, as this rank holds them.

    Attributes:
        networks: of the pipeline stages of this rank; without a pipeline, one.
        weights: by name.
        optimizer: over the weights' parameters.
        loss_scale: of fp16.
        mesh: the ranks.
        course: of the losses.
        rate: how callbacks changed the learning rate of this round.
        replicated_slots: slots of the optimizer that every rank holds of the full weight.
        state_shardings: running statistics that are tensor parallel -> how they are sharded, and their full shapes.
        average: of weights and running statistics; None: a run keeps none.
        pruning: which elements of weights stay zero; None: a run prunes nothing.
        local_sgd: what workers of local SGD have in common; None: there is one worker.
        is_torn: some weights are updated and others are not (`onward.engine.update_in_backward`).
    """

    networks: Sequence[Network]
    weights: Mapping[str, LocalWeight]
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale | None
    mesh: Mesh = field(default_factory=in_world_of_one)
    state_shardings: Mapping[str, tuple[Sharding, tuple[int, ...]]] = field(default_factory=dict)
    replicated_slots: tuple[str, ...] = ()
    counters: Counters = field(default_factory=Counters)
    cursor: DataCursor = field(default_factory=DataCursor)
    rate: RateAdjustment = field(default_factory=RateAdjustment)
    course: LossCourse = field(default_factory=LossCourse)
    average: WeightAverage | OptimizerAverage | None = None
    pruning: WeightPruning | None = None
    local_sgd: LocalSGD | None = None
    is_torn: bool = False
    _mark: _Mark | None = None
    _skipped: torch.Tensor | None = None

    @property
    def torch_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by weight."""
        return {name: weight.parameter for name, weight in self.weights.items()}

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.mesh.device

    def train(self, mode: bool = True) -> None:
        """Turns dropout and batch statistics on or off."""
        for network in self.networks:
            network.train(mode)
            network.net.train(mode)

    def mark(self) -> None:
        """Remembers the state as it is now, after a weight update; weights and moments stay until the next one."""
        statistics = self._statistics()
        kept = [torch.empty_like(tensor) for tensor in statistics] if self._mark is None else self._mark.statistics
        copy_all(statistics, kept)
        self._mark = _Mark(dataclasses.replace(self.counters), self.cursor, self.random_states(), kept)

    def restore_statistics(self, where: torch.Tensor | None = None) -> None:
        """Puts running statistics back to where they were at the mark; if `where` is true, a boolean on the device."""
        assert self._mark is not None
        kept, now = self._mark.statistics, self._statistics()
        copy_all(kept if where is None else choose(where, kept, now), now)

    def count_skipped_later(self, skipped: torch.Tensor) -> None:
        """Remembers whether an update was skipped, a boolean on the device that nobody waits for yet."""
        self._skipped = skipped.long() if self._skipped is None else self._skipped + skipped

    def count_skipped(self) -> None:
        """Counts the skipped updates that the device knows of; waits for it."""
        if self._skipped is None:
            return
        found, self._skipped = int(self._skipped), None
        self.counters.skipped_updates += found
        if self._mark is not None:
            self._mark.counters.skipped_updates += found

    def return_to_mark(self) -> None:
        """Forgets what was computed since the last weight update: a step that failed, gradients accumulated before."""
        if self._mark is None:
            return
        self.drop_gradients()
        self.restore_statistics()
        self.counters, self.cursor = dataclasses.replace(self._mark.counters), self._mark.cursor
        self.set_random_states(self._mark.random)

    def drop_gradients(self) -> None:
        """Forgets the gradients of all weights."""
        for weight in self.weights.values():
            weight.drop_gradient()

    def _statistics(self) -> list[torch.Tensor]:
        return list(self.statistics().values())

    def statistics(self) -> dict[str, torch.Tensor]:
        """Running statistics of this rank by name."""
        found: dict[str, torch.Tensor] = {}
        for network in self.networks:
            found |= network.net.running_statistics()
        return found

    def sharded_tensors(self, is_of_same_workers: bool = True) -> dict[str, ShardedTensor]:
        """Every tensor by a flat name: `weights/...`, `states/...`, `average/...`, `pruned/...`,
        `slots/<slot>/...`, `random/<rank>/...`.

        With local SGD weights and statistics are the synchronized ones. Those of every worker are
        `workers/<worker>/weights/...`, and its slots `workers/<worker>/slots/...`, except that those of worker 0 have
        their ordinary names; the outer optimizer's are `outer/<slot>/...`.

        Args:
            is_of_same_workers: False for loading what another number of workers saved: without what is of one worker,
                and the slots of each by their ordinary names.
        """
        found, slots_at = self._weights_and_statistics(), "slots/"
        if self.local_sgd is not None and is_of_same_workers:
            at = f"workers/{self.local_sgd.worker}/"
            slots_at = f"{at if self.local_sgd.worker else ''}slots/"
            own = self.local_sgd.own.items()
            found |= {f"{at}{self._kind(name)}/{name}": self._sharded_like(name, tensor) for name, tensor in own}
        if self.average is not None:
            tensors = self.average.tensors.items()
            found |= {f"average/{name}": self._sharded_like(name, tensor) for name, tensor in tensors}
        if self.pruning is not None:
            found |= {f"pruned/{name}": self._sharded_like(name, mask) for name, mask in self.pruning.masks.items()}
        for name, slots in slots_by_name(self.optimizer, self.torch_parameters).items():
            weight = self.weights[name]
            for slot, tensor in slots.items():
                is_full = slot in self.replicated_slots
                full = ShardedTensor.full(tensor, weight.is_first) if is_full else weight.sharded_like(tensor)
                found[f"{slots_at}{slot}/{name}"] = full
        return found | {name: ShardedTensor.full(tensor) for name, tensor in self.random_states().items()}

    def _weights_and_statistics(self) -> dict[str, ShardedTensor]:
        """Those that are exported."""
        if self.local_sgd is None:
            found = {f"weights/{name}": weight.sharded for name, weight in self.weights.items()}
            return found | {f"states/{n}": self._sharded_like(n, tensor) for n, tensor in self.statistics().items()}
        common, is_first = {**self.statistics(), **self.local_sgd.synchronized}, self.local_sgd.worker == 0
        found = {f"{self._kind(name)}/{name}": self._sharded_like(name, one) for name, one in common.items()}
        outer = self.local_sgd.momentum.items()
        found |= {f"outer/{OUTER_SLOT}/{name}": self._sharded_like(name, one) for name, one in outer}
        return {n: dataclasses.replace(one, is_written=one.is_written and is_first) for n, one in found.items()}

    def _kind(self, name: str) -> str:
        return "weights" if name in self.weights else "states"

    def _sharded_like(self, name: str, tensor: torch.Tensor) -> ShardedTensor:
        """A tensor of this worker that is sharded like the weight or running statistic of that name."""
        if name in self.weights:
            return self.weights[name].sharded_like(tensor)
        place = self.mesh.topology.place_in_worker(self.mesh.place)
        cut = self.state_shardings.get(name)
        if cut is None:
            return ShardedTensor.full(tensor, place.data == place.horizontal == 0)
        sharding, shape = cut
        shards = sharding.shards(shape, place.horizontal, self.mesh.topology.horizontal_size)
        return ShardedTensor(tensor, shape, shards, place.data == 0)

    def keep_average(self, settings: Averaging) -> None:
        """Averages weights and running statistics from now on, where settings or optimizer ask for it."""
        if isinstance(self.optimizer, AdamWScheduleFree):
            self.average = OptimizerAverage(self.optimizer, self.torch_parameters)
        if settings.kind is not None:
            numbers = {name: tensor for name, tensor in self.statistics().items() if tensor.is_floating_point()}
            self.average = WeightAverage(settings, {**self.torch_parameters, **numbers})

    def prune(self, settings: Pruning, axes: Mapping[str, int]) -> None:
        """Prunes weights from now on, where the settings ask for it; `axes` are those that matmuls sum over."""
        if settings.pattern is not None:
            weights = {name: weight for name, weight in self.weights.items() if name in axes}
            self.pruning = WeightPruning(settings, weights, axes, self.mesh)

    def train_locally(self, distributed: Distributed) -> None:
        """Synchronizes workers from now on, where the settings ask for it."""
        if distributed.sync_every_updates is not None:
            self.local_sgd = LocalSGD(distributed, self.mesh, self.weights, self.statistics())

    def after_update(self, is_last: bool = False) -> None:
        """What follows each weight update, a skipped one included; the last of a round or not."""
        if self.local_sgd is not None and self.local_sgd.after_update(is_last):
            self._update_followers()
        if self.average is not None:
            self.average.after_update(self.counters.update)
        if self.pruning is not None:
            self.pruning.after_update(
                self.counters.update, {} if self.average is None else self.average.pruned_with_weights
            )

    def end_round_early(self) -> bool:
        """What an update would have done, had it been known to be the last of its round; whether weights changed."""
        if self.local_sgd is None or not self.local_sgd.end_round():
            return False
        self._update_followers()
        self.mark()
        return True

    @property
    def stale_updates(self) -> int:
        """Weight updates that are not in what evaluations and exports see: of workers, since they synchronized last."""
        return 0 if self.local_sgd is None else self.local_sgd.updates

    @property
    def exports_average(self) -> bool:
        """Whether evaluations and the trained model are of the average; until there is one, weights stand for it."""
        return self.average is not None and self.average.count > 0 and self.average.settings.export == "average"

    @contextlib.contextmanager
    def averaged(self, is_averaged: bool = True) -> Iterator[None]:
        """For as long as this lasts, the average stands where the weights are; nothing where `is_averaged` is false.

        With local SGD the synchronized weights do in any case.
        """
        average = self.average if is_averaged and self.average is not None and self.average.count else None
        if (shown := self.local_sgd or average) is None:
            yield
            return
        try:
            with torch.no_grad(), shown.in_place():
                self._update_followers()
                yield
        finally:
            self._update_followers()

    @torch.no_grad()
    def _update_followers(self) -> None:
        for weight in self.weights.values():
            weight.update_followers()

    def random_states(self) -> dict[str, torch.Tensor]:
        """Of this rank's generators, as they are now."""
        found = {f"random/{self.mesh.rank}/cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found[f"random/{self.mesh.rank}/cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def set_random_states(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts generators back to what `random_states` gave; those that are not given stay as they are."""
        cpu, cuda = (tensors.get(f"random/{self.mesh.rank}/{kind}") for kind in ("cpu", "cuda"))
        if cpu is not None:
            torch.set_rng_state(cpu)
        if cuda is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(cuda, self.device)

    def record(self) -> dict[str, Any]:
        """Everything of the state that is no tensor and that all ranks have in common, ready for JSON."""
        self.count_skipped()
        return {
            "counters": dataclasses.asdict(self.counters),
            "cursor": self.cursor.to_dict(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.to_json(),
            "learning_rate": dataclasses.asdict(self.rate),
            "average": None if self.average is None else self.average.count,
            "local_sgd": None if self.local_sgd is None else self.local_sgd.record(),
            "pruned": None if self.pruning is None else self.pruning.sparsity,
            "course": {
                "losses": self.course.losses,
                "log_norms": self.course.log_norms,
                "rollbacks": self.course.rollbacks,
                "first_loss": self.course.first_loss,
            },
        }

    def rank_record(self) -> dict[str, Any]:
        """What every rank has of its own: where it is in its part of the data; its worker's loss scale."""
        spans = [[list(begin), list(end)] for begin, end in self.course.spans]
        found = {"data": self.mesh.reader, "cursor": self.cursor.to_dict(), "left_out": spans}
        if self.local_sgd is not None:
            found["loss_scale"] = None if self.loss_scale is None else self.loss_scale.to_json()
            found["skipped_updates"] = self.counters.skipped_updates
        return found

    def restore(self, random: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> list[str]:
        """Takes over `record` and the random states; the other tensors are loaded in place. Returns what to report."""
        self.counters = Counters(**record["counters"])
        self.rate = RateAdjustment(**record.get("learning_rate", {}))
        replica, replicas = self.mesh.reader, self.mesh.topology.reader_count
        self.cursor, notes = resumed_cursor(record, replica, replicas)
        self.course = LossCourse(**record.get("course", {}))
        if self.average is not None:
            self.average.count = record.get("average") or 0
        if self.pruning is not None:
            self.pruning.sparsity = record.get("pruned") or 0.0
        if self.local_sgd is None:
            notes += notes_on_workers(record, 1)
        else:
            notes += self.local_sgd.restore(record)
            record = {**record, **self.local_sgd.of_worker(record, replica)}
            self.counters.skipped_updates = record.get("skipped_updates", self.counters.skipped_updates)
        left_out = {entry["data"]: entry.get("left_out", []) for entry in record.get("ranks", {}).values()}
        if len(left_out) == replicas:  # with another number of replicas, each reads other data
            self.course.spans = [(tuple(begin), tuple(end)) for begin, end in left_out[replica]]
        if self.loss_scale is not None and record["loss_scale"] is not None:
            stored = LossScale.from_json(record["loss_scale"])
            # Asked for another kind of loss scale than before, the run begins with that one.
            if stored.reset() == self.loss_scale.reset():
                self.loss_scale = stored
        self.is_torn = False
        self.set_random_states(random)
        self._update_followers()
        return notes
