"""What every rank of a run asks of the others, recorded on one process, and whether all of it meets.

A rank's run is the product's own, on a process group that answers each call at once and writes it down. The queues
of all ranks are then simulated as NCCL works them off: in order for each group, collectives when all members have
arrived, transfers of a batch together.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

from onward.parallel.pipeline import transfers

Arrivals = Sequence[Sequence[torch.Tensor]]
"""For each stage of a rank that receives from another rank, in order: tensors like those that arrive."""


@dataclass(frozen=True)
class Call:
    """A collective or a transfer that a rank asks for.

    Attributes:
        group: by name: `data`, `horizontal`, `pipeline`, or `control` for all ranks.
        kind: of collective; `send` or `recv`.
        tensors: sizes and element type of each.
        detail: operation of a reduction, or root; None: neither.
        peer: within the group, of a transfer.
    """

    group: str
    kind: str
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    detail: Any = None
    peer: int = -1

    def __str__(self) -> str:
        """For messages."""
        shapes = ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in self.tensors)
        more = "" if self.detail is None else f" {self.detail}"
        return f"{self.kind} {shapes}{more} on {self.group}" + (f" with {self.peer}" if self.peer >= 0 else "")


@dataclass(frozen=True)
class Post:
    """Calls that are started together."""

    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Wait:
    """The rank goes on when the post of this number, counted from 0, is complete."""

    post: int


Step = Post | Wait


class _Transfer:
    """Answers `wait` of a send or a receive."""

    def __init__(self, recording: Recording, post: int) -> None:
        self._recording, self._post = recording, post

    def wait(self, timeout: object = None) -> bool:
        self._recording.steps.append(Wait(self._post))
        return True

    def is_completed(self) -> bool:
        return True


@dataclass
class Recording:
    """What one rank asked for.

    Attributes:
        arrivals: what stages receive; sizes travel in headers, which nobody sends here.
        steps: in order.
        posts: how many of them are posts.
    """

    arrivals: deque[Sequence[torch.Tensor]]
    steps: list[Step] = field(default_factory=list)
    posts: int = 0
    _batch: list[Call] | None = None

    def collective(self, call: Call, tensors: Sequence[torch.Tensor]) -> Any:
        """A collective; the rank waits for it at once, which is stricter than what engines do."""
        self.steps += [Post((call,)), Wait(self.posts)]
        self.posts += 1
        done: Future[list[torch.Tensor]] = Future()
        done.set_result(list(tensors))
        return _create_work_from_future(done)

    def transfer(self, call: Call) -> _Transfer:
        """A send or a receive, by itself or of a batch."""
        if self._batch is not None:
            self._batch.append(call)
            return _Transfer(self, self.posts)
        self.steps.append(Post((call,)))
        self.posts += 1
        return _Transfer(self, self.posts - 1)

    def fill(self, tensor: torch.Tensor) -> None:
        """What a rank receives: ones, by which torch's stages agree that sizes are known, or a header with sizes."""
        is_header = tensor.dtype == torch.int64 and tensor.dim() == 2 and tensor.shape[1] == 2 + transfers.MOST_AXES
        if is_header:
            tensor.copy_(transfers._header(self.arrivals.popleft(), tensor.device))
        else:
            tensor.fill_(1)

    def batched(self, original: Callable[[Any], Any], operations: Sequence[dist.P2POp]) -> Any:
        """`torch.distributed.batch_isend_irecv`, as one post."""
        self._batch = []
        try:
            found = original(operations)
            self.steps.append(Post(tuple(self._batch)))
            self.posts += 1
        finally:
            self._batch = None
        return found


class RecordingGroup(dist.ProcessGroup):
    """A process group of which only this rank exists."""

    def __init__(self, rank: int, size: int, recording: Recording, name: Callable[[RecordingGroup], str]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._own, self._recording, self._role = rank, recording, name

    def getBackendName(self) -> str:
        return "recording"

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.pg_name

    def _call(self, kind: str, tensors: Sequence[torch.Tensor], detail: Any = None, peer: int = -1) -> Call:
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        return Call(self._role(self), kind, shapes, detail, peer)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return self._recording.collective(self._call("all_reduce", tensors, _operation(opts)), tensors)

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        root = getattr(opts, "rootRank", 0)
        for tensor in tensors if root != self._own else ():
            if tensor.is_floating_point():  # others are facts about weights, by which DDP checks that ranks agree
                tensor.fill_(1)
        return self._recording.collective(self._call("broadcast", tensors, f"from {root}"), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for targets, source in zip(outputs, inputs, strict=True):
            for target in targets:
                target.copy_(source.clone())
        return self._recording.collective(self._call("all_gather", inputs), outputs[0])

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        output.view(-1, given.numel()).copy_(given.clone().reshape(1, -1))
        return self._recording.collective(self._call("all_gather_single", [given]), [output])

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:  # type: ignore[override]
        outputs[0].copy_(inputs[0][self._own])
        return self._recording.collective(self._call("reduce_scatter", inputs[0], _operation(opts)), outputs)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        output.copy_(given.view(self.size(), -1)[self._own].view_as(output))
        return self._recording.collective(self._call("reduce_scatter_single", [given], _operation(opts)), [output])

    # Names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> Any:
        return self._recording.collective(self._call("barrier", []), [])

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        return self._recording.transfer(self._call("send", tensors, peer=peer))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        for tensor in tensors:
            self._recording.fill(tensor)
        return self._recording.transfer(self._call("recv", tensors, peer=peer))


_OPERATIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")


def _operation(options: Any) -> str:
    """Of a reduction; a sum, as torch has it, where none is given."""
    asked = getattr(options, "reduceOp", dist.ReduceOp.SUM)
    return next((name for name in _OPERATIONS if asked == getattr(dist.ReduceOp, name)), "of another kind")


@contextlib.contextmanager
def recording_rank(
    rank: int, world_size: int, arrivals: Arrivals, role: Callable[[list[int]], str]
) -> Iterator[Recording]:
    """torch.distributed as one rank among others that are not there; what it asks for is in the recording.

    Args:
        rank, world_size: of this process.
        arrivals: see `Recording`.
        role: ranks of a group -> its name.
    """
    recording = Recording(deque(arrivals))

    def named(group: RecordingGroup) -> str:
        return role(dist.get_process_group_ranks(group))

    def make(store: Any, group_rank: int, size: int, timeout: Any) -> RecordingGroup:
        return RecordingGroup(group_rank, size, recording, named)

    dist.Backend.register_backend("recording", make, devices=["cpu"])
    original, new_group = dist.batch_isend_irecv, dist.new_group
    dist.init_process_group("recording", rank=rank, world_size=world_size, store=HashStore())
    try:
        with (
            mock.patch.object(dist, "batch_isend_irecv", lambda ops: recording.batched(original, ops)),
            mock.patch.object(dist, "new_group", lambda *a, backend=None, **k: new_group(*a, **k)),
            mock.patch("onward.parallel.launch.process.set_group_timeout"),  # nothing waits, and torch would warn
        ):
            yield recording
    finally:
        dist.destroy_process_group()
