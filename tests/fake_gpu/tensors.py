"""Tensors that say they are on a GPU and compute on the CPU: who mixes devices fails, who waits for the GPU is seen.

They hold real numbers, so that a run on the fake GPU can be compared with the same run on a CPU. Kernels, streams
and memory of a GPU are not simulated.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from onward.engine import utilization
from onward.lowering.ops import fused, fused_cross_entropy
from tests.fake_gpu.kernels import INSTEAD

aten = torch.ops.aten
GPU = torch.device("cuda", 0)

WAITING = frozenset(
    {
        aten._local_scalar_dense.default,
        aten.is_nonzero.default,
        aten.equal.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.repeat_interleave.Tensor,
        aten.bincount.default,
    }
)
"""Operators whose result, or the size of it, the host has to know before it continues."""

MIXING = frozenset({aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default})
"""Operators that take tensors of both devices."""

LOW = (torch.float16, torch.bfloat16)


class GpuTensor(torch.Tensor):
    """A tensor on the fake GPU; `numbers` are in host memory."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> GpuTensor:
        """Wraps numbers as they are in memory."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            layout=numbers.layout,
            device=GPU,
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Every operator on such tensors."""
        return compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Which torch refuses for classes of tensors."""
        WAITS.add("tolist")
        return self.numbers.tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({self.numbers!r})"


class Factories(TorchDispatchMode):
    """Operators that make tensors, which have none among their arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Waits:
    """For which operators the host waited, and where they were called from."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def add(self, what: str) -> None:
        """Counts one."""
        frames = [f for f in traceback.extract_stack() if "/onward/" in f.filename]
        place = f"{frames[-1].filename.split('/onward/')[-1]}:{frames[-1].name}" if frames else "?"
        self.found.append((what, place))

    def take(self) -> list[tuple[str, str]]:
        """What came since this was called last."""
        found, self.found = self.found, []
        return found


WAITS = Waits()
SEEN: set[str] = set()


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operator, on the CPU, with its result on the device on which torch would leave it."""
    flat = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    is_on_gpu = any(isinstance(leaf, GpuTensor) for leaf in flat)
    asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if func is aten._pin_memory.default or func is aten.is_pinned.default:
        return flat[0] if func is aten._pin_memory.default else hasattr(flat[0], "is_page_locked")
    if any(isinstance(leaf, FakeTensor) for leaf in flat):
        return func(*args, **kwargs)  # inside of a forecast of shapes
    if not is_on_gpu and (asked is None or asked.type != "cuda"):
        return func(*args, **kwargs)
    SEEN.add(str(func))
    _check_devices(func, flat, asked)
    to_gpu = is_on_gpu if asked is None else asked.type == "cuda"
    if func is aten._to_copy.default:
        _note_copy(flat[0], to_gpu, bool(kwargs.get("non_blocking")))
    elif func in (aten.copy_.default, aten._foreach_copy_.default):
        to_gpu = True
        for target, source in _pairs(func, args):
            to_gpu = isinstance(target, GpuTensor)
            _note_copy(source, to_gpu, bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
    elif func in WAITING or (func in (aten.index.Tensor, aten.index_put_.default) and _has_mask(args[1])):
        WAITS.add(str(func))
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs.pop("pin_memory", None)
    wrappers = {id(leaf.numbers): leaf for leaf in flat if isinstance(leaf, GpuTensor)}
    kernel = INSTEAD.get(func, func)
    inner_args, inner_kwargs = tree_map(
        lambda leaf: leaf.numbers if isinstance(leaf, GpuTensor) else leaf, (args, kwargs)
    )
    result = _call(kernel, inner_args, inner_kwargs)

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in wrappers:
            return wrappers[id(leaf)]
        return GpuTensor(leaf) if to_gpu else leaf

    return tree_map(wrapped, result)


def _call(kernel: Any, args: Any, kwargs: Any) -> Any:
    """The kernel's result; in fp32, and rounded, where CPUs have no kernel for 16 bits."""
    try:
        return kernel(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        low = [leaf.dtype for leaf in tree_flatten(args)[0] if isinstance(leaf, torch.Tensor) and leaf.dtype in LOW]
        if not low or "not implemented for" not in str(error):
            raise

        def cast(dtype: torch.dtype, *from_: torch.dtype) -> Any:
            return lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in from_ else leaf

        return tree_map(cast(low[0], torch.float32), kernel(*tree_map(cast(torch.float32, *LOW), args), **kwargs))


def _check_devices(func: Any, flat: list[torch.Tensor], asked: torch.device | None) -> None:
    if func in MIXING or not any(isinstance(leaf, GpuTensor) for leaf in flat):
        return
    for leaf in flat:
        if not isinstance(leaf, GpuTensor) and leaf.dim() > 0:
            raise RuntimeError(f"{func}: expected all tensors on the same device, found cuda:0 and {leaf.device}")


def _note_copy(source: torch.Tensor, to_gpu: bool, non_blocking: bool) -> None:
    """A copy between the devices waits for all work before it, unless it is from page-locked memory and says so."""
    from_gpu = isinstance(source, GpuTensor)
    if from_gpu and not to_gpu:
        WAITS.add("copy to the host")
    elif to_gpu and not from_gpu and not (non_blocking and hasattr(source, "is_page_locked")):
        WAITS.add("copy to the GPU")


def _pairs(func: Any, args: Any) -> Iterator[tuple[Any, Any]]:
    yield from [(args[0], args[1])] if func is aten.copy_.default else zip(args[0], args[1], strict=True)


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _pinned(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    copy = tensor.clone()
    copy.is_page_locked = True  # type: ignore[attr-defined]
    return copy


@contextlib.contextmanager
def fake_gpu() -> Iterator[Waits]:
    """A GPU that torch believes in; `hooks.cpp` must have been loaded before torch."""
    put_back: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        put_back.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    state = torch.get_rng_state()
    for name, value in {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "get_rng_state": lambda *_: state.clone(),
        "set_rng_state": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        "current_stream": lambda *_: SimpleNamespace(synchronize=lambda: WAITS.add("synchronize")),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
        "synchronize": lambda *_: WAITS.add("synchronize"),
        "mem_get_info": lambda *_: (80 * 2**30, 80 * 2**30),
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 2**20,
        "reset_peak_memory_stats": lambda *_: None,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: "a fake GPU",
    }.items():
        replace(torch.cuda, name, value)
    is_plain = fused.is_plain  # type: ignore[attr-defined]
    for module in (fused, fused_cross_entropy):
        replace(module, "is_plain", lambda tensor: isinstance(tensor, GpuTensor) or is_plain(tensor))
    replace(utilization, "matmul_rate", lambda *_: 1e15)  # measured where steps take long: nothing is fast here
    replace(torch.distributed, "is_nccl_available", lambda: True)
    replace(torch.Tensor, "pin_memory", _pinned)
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    lift = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with Factories():
            yield WAITS
    finally:
        torch._C._set_only_lift_cpu_tensors(lift)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        for owner, name, value in reversed(put_back):
            setattr(owner, name, value)
