"""Processors, memory and GPUs of this machine, what keeps torch from using them, and how fast they multiply."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import torch
import torch.version

from onward.diagnosis.findings import Finding
from onward.engine.matmul_rate import format_operations, matmul_rate
from onward.errors import ParametersError
from onward.operating_system import free_memory_bytes, is_linux, loaded_allocator, processor_name, usable_cores
from onward.parallel.rendezvous.launcher import detect

SMALL_MEMORY_BYTES = 2e9


def check_devices() -> Iterator[Finding]:
    """Cores, threads, memory, GPUs, and what launchers left in the environment."""
    cores, threads = usable_cores(), torch.get_num_threads()
    name = processor_name() or "unknown processor"
    usable = f"{cores} of {_plural(os.cpu_count() or cores, 'core')} usable"
    yield Finding("cpu", f"{name}; {usable}, torch uses {_plural(threads, 'thread')}")
    if threads > cores:
        yield Finding(
            "cpu",
            f"{threads} threads share {cores} cores",
            "note",
            f"Set machine.threads: {cores}, or OMP_NUM_THREADS={cores}.",
        )
    free = free_memory_bytes()
    if free < SMALL_MEMORY_BYTES:
        yield Finding(
            "memory", f"{free / 1e9:.1f} GB free", "note", "Close other programs, or train with smaller batches."
        )
    else:
        yield Finding("memory", f"{free / 1e9:.1f} GB free")
    yield from _check_allocator()
    yield from _check_gpus()
    try:
        launch = detect()
    except ParametersError as error:
        yield Finding(
            "launcher", str(error), "problem", "Unset the environment variables left over from another launcher."
        )
    else:
        is_alone = launch.launcher == "none"
        yield Finding(
            "launcher", "none" if is_alone else f"{launch.launcher}: rank {launch.rank} of {launch.world_size}"
        )


def _check_allocator() -> Iterator[Finding]:
    """Of tensors on CPUs, where it decides what a process takes beyond them (docs/explanation/memory.md)."""
    if not is_linux() or torch.cuda.is_available():
        return
    name = loaded_allocator()
    if name is not None:
        yield Finding("memory", f"allocated by {name}")
        return
    yield Finding(
        "memory",
        "allocated by the C library, which fragments: a process may take 1.4 times the memory that its run needs",
        "note",
        "If memory is short: install tcmalloc (Debian: apt install libtcmalloc-minimal4), and train with "
        "LD_PRELOAD=libtcmalloc_minimal.so.4 in the environment.",
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _check_gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            yield Finding("gpu", "none")
            return
        build = "is a build for CPUs" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        yield Finding(
            "gpu",
            f"nvidia-smi is installed, but torch {torch.__version__} finds no GPU; it {build}",
            "problem",
            "Install a CUDA build of torch that the driver supports, and check CUDA_VISIBLE_DEVICES.",
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        yield Finding(
            "gpu",
            f"{index}: {properties.name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, compute capability "
            f"{capability}, CUDA {torch.version.cuda}, bf16 {'yes' if torch.cuda.is_bf16_supported() else 'no'}",
        )


def check_products(seconds: float) -> Iterator[Finding]:
    """The throughput of large matmuls in the element types that training uses, on each kind of device.

    Args:
        seconds: for all of them in total.
    """
    kinds = [torch.device("cpu")] + ([torch.device("cuda", 0)] if torch.cuda.is_available() else [])
    cases = [(device, dtype) for device in kinds for dtype in (torch.float32, torch.bfloat16)]
    for device, dtype in cases:
        rate = matmul_rate(device, dtype, seconds / len(cases))
        yield Finding("speed", f"{device.type}, {str(dtype).removeprefix('torch.')}: {format_operations(rate)}/s")
