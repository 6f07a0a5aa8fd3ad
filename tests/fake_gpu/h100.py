"""An H100 that torch's compiler generates code for, on a machine without one: Triton source, PTX and machine code.

What `fake_gpu` makes torch believe is enough to train; the compiler asks for more: how large the GPU is, which driver
Triton has, and which kernel attention uses. Nothing is launched.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._dynamo import device_interface
from torch._inductor import config
from torch._inductor.fx_passes import joint_graph, pad_mm
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import GPUTarget

from tests.fake_gpu.tensors import GPU, Factories

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30,
)
"""As CUDA reports them."""


class _Driver:
    """What Triton asks of a driver before it launches anything."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return GPU


def _without_choosing(precompile: Any) -> Any:
    """Compiles the first of several forms of a kernel, among which a GPU would choose by measuring."""

    def compile_first(self: Any) -> None:
        self.configs = self.configs and self.configs[:1]
        precompile(self)

    return compile_first


def _with_tensors(deduce: Any) -> Any:
    """The compiler evaluates constants on the device: there are tensors for it."""

    def deduce_value(self: Any, node: Any) -> Any:
        with Factories():
            return deduce(self, node)

    return deduce_value


@contextlib.contextmanager
def generating_code(hooks: ctypes.CDLL) -> Iterator[FakeTensorMode]:
    """Within `fake_gpu()`: torch's compiler generates and compiles code for an H100; gives a mode for its arguments.

    Args:
        hooks: `hooks.cpp`, compiled.
    """
    interface = device_interface.CudaInterface
    folding = joint_graph.UniformValueConstantFolder
    triton.runtime.driver.set_active(_Driver())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(config.patch(compile_threads=1, force_disable_caches=True))
        for owner, name, value in [
            (torch.version, "cuda", "13.0"),
            (torch.cuda, "get_device_properties", lambda *_: PROPERTIES),
            (interface, "get_device_properties", staticmethod(lambda *_: PROPERTIES)),
            (interface, "is_bf16_supported", staticmethod(lambda *_, **__: True)),
            (torch.cuda, "_exchange_device", lambda *_: 0),
            (torch.cuda, "_maybe_exchange_device", lambda *_: 0),
            (FakeTensorMode, "avoid_device_init", True),
            (pad_mm, "_should_pad", lambda *_, **__: True),  # a GPU would measure whether it gains anything
            (folding, "_deduce_value", _with_tensors(folding._deduce_value)),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (CachingAutotuner, "_precompile_worker", _without_choosing(CachingAutotuner._precompile_worker)),
            (CachingAutotuner, "_make_launchers", lambda _: None),  # they need memory on a GPU, as does what follows
            (CachingAutotuner, "_dynamic_scale_rblock", lambda _: None),
        ]:
            stack.enter_context(mock.patch.object(owner, name, value))
        for name, value in {"_cuda_getCurrentRawStream": 0, "_cuda_cudaCachingAllocator_is_enabled": True}.items():
            stack.enter_context(mock.patch.object(torch._C, name, lambda *_, value=value: value, create=True))
        hooks.set_generating(True)
        stack.callback(hooks.set_generating, False)
        yield FakeTensorMode()
