"""Copies of a run's tensors in host memory, from which a checkpoint is written while training continues.

The buffers are made at the first save and used again at each later one. Those of tensors on a GPU are page-locked, so
that the GPU writes into them by itself, all tensors at once, at the full speed of the bus.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping

import torch

_PORTABLE = 1
"""`cudaHostRegisterPortable`: page-locked for every GPU of the process."""

LOG = logging.getLogger("onward")


class HostCopies:
    """The buffers of a checkpoint writer."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._like: dict[str, tuple[torch.Size, torch.dtype, bool]] = {}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors as they are now, queued kernels included; the caller may change them as soon as this returns.

        What an earlier call returned is overwritten.
        """
        like = {name: (tensor.shape, tensor.dtype, tensor.is_cuda) for name, tensor in tensors.items()}
        if like != self._like:
            self._buffers, self._like = {}, {}  # the old ones are let go of before there are new ones
            self._buffers = {name: _buffer(tensor) for name, tensor in tensors.items()}
            self._like = like
        if tensors:
            # In one call: torch's own stager takes three times as long on a CPU.
            torch._foreach_copy_(list(self._buffers.values()), [tensors[name] for name in self._buffers], True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._buffers)


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor.

    Page-locked memory of torch's allocator comes in powers of two, up to twice of what is needed; this does not.
    """
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.is_cuda and buffer.numel():
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failure = int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE))
        if failure:
            LOG.warning(
                "%d bytes could not be page-locked (CUDA error %d): saving takes longer.", buffer.nbytes, failure
            )
        else:
            release = weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr())
            release.atexit = False  # CUDA is gone by then
    return buffer
