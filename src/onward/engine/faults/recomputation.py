"""Silent corruption of computations: now and then all replicas compute one micro-batch of one of them, and their
results are compared bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import torch

from onward.data.batches import Batch
from onward.engine.faults.integrity import GO_BACK
from onward.engine.loop import is_due
from onward.engine.micro_batches import SequentialMicroBatches, shared_loss
from onward.engine.state import TrainState
from onward.errors import CorruptionError, ParametersError
from onward.parallel.agreement import describe_processes, gather_codes
from onward.parallel.data_parallel import reshard
from onward.parallel.digests import Difference, Replicas, digests, find_differing, find_replicas
from onward.parallel.pipeline.transfers import broadcast
from onward.parallel.rendezvous.rendezvous import name_ranks
from onward.parameters import Parameters
from onward.spelling import shortened

LOSS = "the loss"
_LISTED = 8


class RecomputationWatch:
    """Lets every replica compute the first micro-batch of one of them, another one each time, and compares the results.

    Compared are the loss and all gradients before they are averaged; with ZeRO, which holds no full gradients, the
    loss alone. Gradients, running statistics and random states are as before afterwards.

    Args:
        state: of the run.
        micro_batches: compute gradients.
        parameters: of the round.

    Raises:
        ParametersError: the device need not give equal bits twice.
    """

    def __init__(self, state: TrainState, micro_batches: SequentialMicroBatches, parameters: Parameters) -> None:
        machine = parameters.machine
        if state.device.type == "cuda" and not machine.deterministic:
            raise ParametersError(
                f"machine.check_computation_period is {machine.check_computation_period}, and equal computations need "
                "not give equal bits on a GPU. Set machine.deterministic to true, or check_computation_period to 0."
            )
        self._state, self._micro_batches = state, micro_batches
        self._period, self._seed = machine.check_computation_period, parameters.training.seed
        self._accumulation = parameters.training.gradient_accumulation_steps
        self._is_sharded = parameters.distributed.zero_stage > 0
        mesh = state.mesh
        self._names = (LOSS, *(() if self._is_sharded else state.weights))
        held = [
            [(name, str(mesh.topology.place(rank).horizontal)) for name in self._names]
            for rank in range(mesh.world_size)
        ]
        self._replicas: list[Replicas] = find_replicas(held)

    def inspected(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; those that begin an update to be checked are computed by all replicas first.

        Raises:
            CorruptionError: on every rank, naming those whose results differ, their machines, and what differs.
        """
        for batch in batches:
            counters = self._state.counters
            if counters.step % self._accumulation == 0 and is_due(counters.update + 1, self._period):
                self._check(batch)
            yield batch

    def _check(self, batch: Batch) -> None:
        state, mesh = self._state, self._state.mesh
        assert mesh.data is not None
        update = state.counters.update + 1
        replica = random.Random(f"{self._seed}/{update}").randrange(mesh.topology.data_size)
        is_mine = mesh.place.data == replica
        own = self._micro_batches.forward.reader.to_tensors(batch.features)
        values = broadcast(list(own.values()) if is_mine else None, len(own), replica, mesh.data, state.device)
        before = state.random_states()
        try:
            shared = {
                name: broadcast([value] if is_mine else None, 1, replica, mesh.data, value.device)[0]
                for name, value in before.items()
            }
            state.set_random_states(shared)
            found = self._compute(dict(zip(own, values, strict=True)))
        finally:
            state.drop_gradients()
            state.restore_statistics()
            state.set_random_states(before)
        differing = find_differing(gather_codes(mesh, found), self._replicas)
        if differing:
            raise CorruptionError(_words(differing, replica, describe_processes(mesh), update))

    def _compute(self, features: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Digests of the loss and of this rank's gradients; 0 for a weight without one."""
        one, state = self._micro_batches, self._state
        if one.forward.network.compilation is not None:
            one.forward.network.compilation.begin_pass()
        with one.reduction.micro_batch(one.forward.module, is_last=False), torch.set_grad_enabled(not self._is_sharded):
            loss = shared_loss(one.forward(features), one.shares.names, None).sum()
            if self._is_sharded:
                reshard(one.forward.module)
                return digests([loss], state.device)
            torch.autograd.backward(loss)
        nothing = torch.zeros(1, device=state.device)
        gradients = [weight.source.grad for weight in state.weights.values()]
        return digests([loss, *(nothing if one is None else one for one in gradients)], state.device)


def _words(differing: Sequence[Difference], replica: int, processes: list[str], update: int) -> str:
    ranks = sorted({rank for one in differing for rank in one.odd})
    everybody = sorted({rank for one in differing for rank in one.ranks})
    names = sorted({one.name for one in differing}, key=lambda name: (name != LOSS, name))
    what = [name if name == LOSS else f"the gradient of {name!r}" for name in names]
    listed = shortened(what, _LISTED)
    who = shortened((f"rank {rank} on {processes[rank]}" for rank in ranks), _LISTED, "; ")
    if ranks == everybody:
        finding = f"{name_ranks(ranks)} computed it and got different bits"
    else:
        finding = f"{name_ranks(ranks)} got different bits than {name_ranks([r for r in everybody if r not in ranks])}"
    return (
        f"silent corruption before update {update}: a micro-batch of replica {replica} was computed by every replica, "
        f"and {finding} of {listed} ({who}). A processor computed a wrong result. {GO_BACK}"
    )
