"""What belongs to the machine: device, threads, log level, determinism. Chosen by itself where nothing is said."""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from onward.errors import ParametersError

if TYPE_CHECKING:
    from onward.parameters import Machine

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads these when a process first uses a GPU; the second is the older name."""
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Names of glibc's `mallopt`, as in its malloc.h."""


def choose_allocator() -> None:
    """Asks torch's allocator for segments on GPUs that can grow, unless the user has asked it for anything.

    Memory then does not fragment where batches differ in shape. To be called before a GPU is used; processes
    that this one starts find it in their environment.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def keep_freed_memory() -> bool:
    """Asks the C library to keep the memory that tensors free, unless the user has asked it for anything.

    Otherwise it hands large blocks back to the system at once, and gets them again page by page, filled with zeros, a
    step later. Only glibc can be asked; whether it was.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        ask = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(ask(_TRIM_THRESHOLD, -1)) and bool(ask(_MMAP_MAX, 0))


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a run computes.

    Attributes:
        execution_provider: `CPU` or `CUDA`; None: CUDA where there is a GPU, else the CPU.
        threads: CPU threads of this process; None: torch's choice.
        log_level: of the logger "onward", which carries what a run reports: steps (DEBUG), messages, evaluations and
            checkpoints (INFO), what went wrong without ending the run (WARNING).
        deterministic: refuse operators whose result depends on timing, and choose deterministic kernels.
    """

    execution_provider: Literal["CPU", "CUDA"] | None = None
    threads: int | None = None
    log_level: int = logging.WARNING
    deterministic: bool = False

    @classmethod
    def of(cls, machine: Machine, log_level: int = logging.WARNING) -> Environment:
        """As the section `machine` of RUN.yaml says."""
        return cls(
            execution_provider=machine.execution_provider,
            threads=machine.threads,
            log_level=log_level,
            deterministic=machine.deterministic,
        )

    @property
    def device(self) -> torch.device:
        """The device of this process.

        Raises:
            ParametersError: CUDA is asked for and there is none.
        """
        provider = self.execution_provider or ("CUDA" if torch.cuda.is_available() else "CPU")
        if provider == "CPU":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise ParametersError(
                "execution_provider is 'CUDA', but torch finds no GPU here; install a CUDA build of torch and a "
                "driver, or use 'CPU'."
            )
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """The kind of device that every process of the run computes on."""
        return "cuda" if self.device.type == "cuda" else "cpu"

    def apply(self) -> None:
        """Sets threads, log level, determinism and the allocators of this process.

        Raises:
            ParametersError: CUDA is asked for and there is none, or the number of threads is none.
        """
        choose_allocator()
        if self.execution_provider not in (None, "CPU", "CUDA"):
            raise ParametersError(f"execution_provider is {self.execution_provider!r}; expected 'CPU' or 'CUDA'.")
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise ParametersError(f"threads is {self.threads!r}; expected a whole number of at least 1, or None.")
        logging.getLogger("onward").setLevel(self.log_level)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.deterministic:
            # cuBLAS reads this at its first call; it must be set before.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(self.deterministic)
        if self.device_kind == "cpu":
            keep_freed_memory()
