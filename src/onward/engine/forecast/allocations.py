"""What tensors are alive when: a log of every allocation while it is active, of fake tensors or real ones.

Kinds are found afterwards, since only then is it known what was kept for a backward pass and what was a gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from onward.parallel.data_parallel import local_part
from onward.parallel.fake_replicas import COLLECTIVES

WORKING, ACTIVATIONS, COMMUNICATION, GATHERED = "working memory", "activations", "communication", "gathered weights"


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs what operators allocate and when it goes; a tensor counts with its full storage, once.

    Args:
        counts_fakes: whether fake tensors count; a real run finds shapes by them, which takes no memory.
    """

    def __init__(self, counts_fakes: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts_fakes = counts_fakes
        self._events: list[tuple[int, float]] = []
        self._sizes: dict[int, float] = {}
        self._kinds: dict[int, str] = {}
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._finalizers: list[weakref.finalize[Any, Any]] = []
        self._next = 0
        self._resize: Any = None
        self.collectives: Counter[str] = Counter()
        self.collective_bytes: Counter[str] = Counter()

    def __enter__(self) -> Allocations:
        """Begins to watch; storages that engines resize in place are followed, too."""
        super().__enter__()  # type: ignore[no-untyped-call]
        original = torch.UntypedStorage.resize_
        self._resize = original

        @functools.wraps(original)
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._note_size(storage, None)
            self._kinds[self._number(storage)] = GATHERED  # ZeRO gives full weights back in this way
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends watching; what is alive stays in the log."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for finalizer in self._finalizers:
            finalizer.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and notes what it allocated, and counts collectives."""
        result = func(*args, **(kwargs or {}))
        name = f"{func.namespace}.{func._schema.name.split('::')[1]}"
        is_collective = name in COLLECTIVES
        for tensor in _tensors(result):
            self.note(tensor, COMMUNICATION if is_collective or func.namespace == "fsdp" else None)
        if is_collective:
            tensors = [*_tensors(args), *_tensors(result)]
            self.collectives[name] += 1
            self.collective_bytes[name] += int(max((t.numel() * t.element_size() for t in tensors), default=0))
            if func.namespace == "c10d":
                for tensor in tensors:
                    self._kinds.setdefault(self._number(tensor.untyped_storage()), COMMUNICATION)
        return result

    def note(self, tensor: torch.Tensor, kind: str | None = None) -> None:
        """Counts a tensor from now on; one that is known already keeps its kind."""
        if not self._counts_fakes and isinstance(tensor, FakeTensor):
            return
        self._note_size(tensor.untyped_storage(), kind)

    def name(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Says of tensors what kind they are and always were, whatever was said of them before."""
        for tensor in _tensors(list(tensors)):
            self._kinds[self._number(tensor.untyped_storage())] = kind

    def name_alive(self, kind: str) -> None:
        """Says of everything that is alive and has no kind yet what it is."""
        for number, size in self._sizes.items():
            if size:
                self._kinds.setdefault(number, kind)

    def rename_alive(self, kind: str, new: str) -> None:
        """Calls everything that is alive and of a kind something else."""
        for number, size in self._sizes.items():
            if size and self._kinds.get(number) == kind:
                self._kinds[number] = new

    def forget_counts(self) -> None:
        """Begins to count collectives from zero."""
        self.collectives.clear()
        self.collective_bytes.clear()

    @property
    def now(self) -> int:
        """A point in the log."""
        return len(self._events)

    def alive(self, at: int) -> dict[str, float]:
        """Bytes by kind at a point in the log."""
        return self._replay(at, at)

    def peak(self, start: int, end: int) -> dict[str, float]:
        """Bytes by kind at the highest moment between two points."""
        return self._replay(start, end)

    def _replay(self, start: int, end: int) -> dict[str, float]:
        sizes: dict[int, float] = {}
        total, best, place = 0.0, -1.0, start
        for index, (number, size) in enumerate(self._events[:end], 1):
            total += size - sizes.get(number, 0.0)
            sizes[number] = size
            if index >= start and total > best:
                best, place = total, index
        found: Counter[str] = Counter()
        sizes.clear()
        for number, size in self._events[:place]:
            sizes[number] = size
        for number, size in sizes.items():
            found[self._kinds.get(number, WORKING)] += size  # type: ignore[assignment]
        return dict(found)

    def _number(self, storage: torch.UntypedStorage) -> int:
        if storage not in self._numbers:
            number = self._next
            self._next += 1
            self._numbers[storage] = number
            self._sizes[number] = 0.0
            self._finalizers.append(weakref.finalize(storage, self._log, number, 0.0))
        found: int = self._numbers[storage]
        return found

    def _note_size(self, storage: torch.UntypedStorage, kind: str | None) -> None:
        number, size = self._number(storage), float(storage.nbytes())
        if kind is not None and size:
            self._kinds.setdefault(number, kind)
        if self._sizes[number] != size:
            self._log(number, size)

    def _log(self, number: int, size: float) -> None:
        self._sizes[number] = size
        self._events.append((number, size))


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Those with their own storage; sparse ones are made of others, which count."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [local_part(leaf) for leaf in leaves if leaf.layout is torch.strided]
