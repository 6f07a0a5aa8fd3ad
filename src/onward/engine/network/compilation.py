"""Compiles segments by `torch.compile`, equal ones once, so that the time it takes hardly grows with depth.

Whether a run compiles is chosen in `compilation_choice.py`.
"""

from __future__ import annotations

import ctypes
import textwrap
import traceback
import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from onward.engine.network.compilation_choice import gains_from_compiling
from onward.errors import ParametersError
from onward.lowering.building.equal_segments import signature_of, structure_of
from onward.lowering.building.segments import SegmentedProgram
from onward.lowering.passes import is_recomputing
from onward.lowering.program import Program

_GROUPS = ("replica_group", "data_group")
"""Arguments of operators that communicate with replicas."""
RUNS_UNCOMPILED = "speed.compile: a segment runs uncompiled, since torch could not compile it"
"""What a run says, with torch's reason behind it."""


class Compilation:
    """Compiled code for the programs of a rank, shared by all that are equal.

    Args:
        is_required: a program that cannot be compiled is an error; else it runs as it is, and `notify` tells so.
        notify: takes a sentence for the user.
        cuda_graphs: training passes are recorded as CUDA graphs and replayed.
        recomputes_cheap: inputs of matmuls and convolutions that are cheap to compute are recomputed in the backward
            pass, which torch's compiler would keep, since matmuls are not fused with what they read.

    """

    def __init__(
        self,
        is_required: bool,
        notify: Callable[[str], None],
        cuda_graphs: bool = False,
        recomputes_cheap: bool = False,
    ) -> None:
        torch.compiler.assume_constant_result(is_recomputing)  # type: ignore[no-untyped-call]  # a graph has one mode
        self.is_required = is_required
        self.notify = notify
        self.cuda_graphs = cuda_graphs
        self.recomputes_cheap = recomputes_cheap
        self._graphs: dict[Hashable, _CompiledGraph] = {}

    @property
    def graph_count(self) -> int:
        """How many different graphs are compiled so far."""
        return len(self._graphs)

    def begin_pass(self) -> None:
        """Says that nothing of earlier passes is needed any more, so that graphs may be replayed in its memory."""
        if self.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def of_segments(self, program: SegmentedProgram, device: torch.device) -> SegmentedProgram:
        """The same program, each of its segments compiled when it is first called."""
        return replace(program, segments=tuple(self.of_program(code, device) for code in program.segments))

    def of_program(self, program: Program, device: torch.device) -> Program:
        """The same program, compiled when it is first called.

        One in which nothing can be joined is left as it is, as is one that communicates with replicas. With
        CUDA graphs all are recorded that compute anything.
        """
        nodes = [node for node in program.code.graph.nodes if node.op == "call_function"]
        if not nodes or any(node.kwargs.get(group) for node in nodes for group in _GROUPS):
            return program
        if not self.cuda_graphs and not gains_from_compiling(program, device):
            return program
        return replace(
            program, run=_SharedCode(self, program.code, any(_keeps_statistics(node.target) for node in nodes))
        )

    def compiled(
        self, code: fx.GraphModule, arguments: tuple[Any, ...], mode: Hashable, is_trained: bool = False
    ) -> _CompiledGraph:
        """The graph for code that is called with arguments of these shapes in a pass of this mode."""
        key = structure_of(code), signature_of(arguments), mode
        if key not in self._graphs:
            is_recorded = self.cuda_graphs and is_trained
            self._graphs[key] = _CompiledGraph(code, arguments[1], is_recorded, self.recomputes_cheap)
        return self._graphs[key]

    def failed(self, error: Exception) -> None:
        """A graph could not be compiled, although its code runs.

        Raises:
            ParametersError: it had to be.
        """
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # Errors of what compiles, rather than traces, begin with its name: backend='inductor' raised:
        first = lines[1] if lines[0].endswith(" raised:") and len(lines) > 1 else lines[0]
        reason = textwrap.shorten(first, 200, placeholder=" ...")
        if self.is_required:
            raise ParametersError(
                f"torch could not compile a segment of the model ({reason}). Set speed.compile to auto, which runs "
                "such segments uncompiled, or to false."
            ) from error
        self.notify(f"{RUNS_UNCOMPILED}: {reason}")


def options_for(device: torch.device, is_recorded: bool = False) -> dict[str, Any]:
    """Options of torch's compiler; with those of CUDA graphs if passes are recorded as such."""
    from onward.engine.network.expanded_writes import CopiedExpansions

    of_device = options_for_cpus() if device.type == "cpu" else {"triton.cudagraphs": True} if is_recorded else {}
    return {"post_grad_custom_pre_pass": CopiedExpansions(), **of_device}


def options_for_cpus() -> dict[str, Any]:
    """Options of torch's compiler on a CPU, so that it asks as little as it can of the C++ compiler.

    The code of a pass is two files instead of one for each kernel: the kernels, and their calls, which are optimized
    less, since a network's hundreds of calls are dearer to optimize than its kernels. And three trials are spared, as
    dear as a layer's code, which tell whether code for wide vectors runs here: it does if torch's own kernels do and
    torch exports the functions for such vectors. (Compilers of C++20, which torch asks for anyway, know the
    instructions.) What somebody decided by `TORCHINDUCTOR_VEC_ISA_OK` stays.
    """
    from torch._inductor import config  # takes a second to import

    from onward.engine.network.concatenated_parts import ConcatenatedParts
    from onward.engine.network.graph_passes import PassSequence
    from onward.engine.network.kept_operands import KeptOperands
    from onward.engine.network.native_tanh import NativeTanh
    from onward.engine.network.ordered_sums import OrderedSums
    from onward.engine.network.recomputed_masks import RecomputedMasks

    options: dict[str, Any] = {
        "cpp_wrapper": True,
        "cpp_wrapper_build_separate": True,
        "joint_custom_post_pass": PassSequence(ConcatenatedParts(), RecomputedMasks(), KeptOperands()),
        "post_grad_custom_post_pass": PassSequence(OrderedSums(), NativeTanh()),
        # Backward passes of convolutions would lay images out in the order of their weights' axes, copying all of them.
        "force_layout_optimization": True,
    }
    lanes = {"AVX512": (16, 8), "AVX2": (8,)}.get(torch.backends.cpu.get_cpu_capability(), ())
    is_widest = 16 in lanes or not torch.cpu._is_avx512_supported()
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if config.cpp.vec_isa_ok is None and lanes and is_widest and library.is_file():
        exported = ctypes.CDLL(str(library))
        if all(hasattr(exported, f"Sleef_expf{count}_u10") for count in lanes):
            options["cpp.vec_isa_ok"] = True
    return options


def _keeps_statistics(function: Any) -> bool:
    return getattr(function, "__name__", "").startswith("batch_normalization")


def _autocast_type(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


class _CompiledGraph:
    """Code that is compiled once, at its first call; recorded as a CUDA graph where that is wanted."""

    def __init__(self, code: fx.GraphModule, device: torch.device, is_recorded: bool, recomputes_cheap: bool) -> None:
        # A module of its own: torch keeps what it compiled with the code of `forward`, and a graph is one mode of it.
        self.code = fx.GraphModule(code, code.graph)
        self.source = code  # a structure may hold its identity
        self.is_compiled = False
        self.is_plain = False
        self.recomputes_cheap = recomputes_cheap
        self._compiled = torch.compile(self.code, dynamic=False, options=options_for(device, is_recorded))

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        if self.is_compiled:
            return self._compiled(*arguments)  # type: ignore[no-any-return]
        # Inside of DDP torch would cut the code again, at its buckets: segments are small enough. And it would compile
        # the backward pass in that pass, where nothing else can be run in its place if it fails.
        passes = torch._functorch.config.patch(
            force_non_lazy_backward_lowering=True, ban_recompute_materialized_backward=not self.recomputes_cheap
        )
        with torch._dynamo.config.patch(optimize_ddp=False), passes, warnings.catch_warnings():
            # The compiler's advice is about calls of torch; as errors, if warnings are, it would end the compilation.
            warnings.filterwarnings("ignore", module=r"torch\.")
            results: tuple[Any, ...] = self._compiled(*arguments)
        self.is_compiled = True
        return results


class _SharedCode:
    """Called instead of a program's code: finds the graph for its arguments and runs that."""

    def __init__(self, compilation: Compilation, code: fx.GraphModule, keeps_statistics: bool) -> None:
        self.compilation = compilation
        self.code = code
        self.keeps_statistics = keeps_statistics
        self._by_mode: dict[Hashable, _CompiledGraph] = {}

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        # The program is one for inputs of fixed shapes: only the mode of the pass can differ between its calls.
        training, device = arguments[:2]
        is_repeated = self.keeps_statistics and is_recomputing()
        mode = training, torch.is_grad_enabled(), is_repeated, _autocast_type(device)
        graph = self._by_mode.get(mode)
        if graph is None:
            is_trained = training and torch.is_grad_enabled()
            graph = self._by_mode[mode] = self.compilation.compiled(self.code, arguments, mode, is_trained)
        if graph.is_plain:
            return self.code(*arguments)  # type: ignore[no-any-return]
        try:
            return graph(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if graph.is_compiled or not _is_of_compiler(error):
                raise
            results = self.code(*arguments)  # a mistake in the model shows here again, and is reported as its own
            self.compilation.failed(error)
            graph.is_plain = True
            return results  # type: ignore[no-any-return]


def _is_of_compiler(error: Exception) -> bool:
    """Whether torch's compiler raised an error, or checked for it in vain, rather than the code that it compiled."""
    homes = ("torch._dynamo", "torch._inductor", "torch._functorch")
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return raised_in.startswith(homes) or any(kind.__module__.startswith(homes) for kind in type(error).__mro__)
