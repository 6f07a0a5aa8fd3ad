"""What `mixed_precision.use_mixed_precision: auto` means on a device: bf16 where its matmuls are faster.

Not by the instruction set alone: Intel's cores multiply bf16 by AVX512-BF16 at half the rate of fp32, and AMD's at
twice; AMX and GPUs are several times as fast. The rates are far enough from the limit that a machine chooses the same
every time; a run that resumes keeps what its checkpoint was trained with, wherever it resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from onward.engine.matmul_rate import format_operations, matmul_rate
from onward.parallel.agreement import gather_numbers
from onward.parallel.launch.process import Mesh
from onward.parameters import MixedPrecision, Parameters

LEAST_SPEEDUP = 1.25
"""So many times as fast must matmuls be: casts of weights and activations take time as well."""
_SECONDS = 0.2
"""For the matmuls of each type."""
_FIELD = "mixed_precision.use_mixed_precision: auto"


def settled_precision(
    parameters: Parameters,
    kind: str,
    record: Mapping[str, Any] | None = None,
    computes_in_bf16: bool | None = None,
) -> tuple[Parameters, str | None]:
    """Parameters whose precision is decided, in every round.

    Args:
        parameters: of a run.
        kind: of the device that it trains on, "cpu" or "cuda"; a CPU is measured where that decides.
        record: of the checkpoint that it resumes from.
        computes_in_bf16: whether a GPU that is not the one here does; None: the one here is asked.

    Returns:
        The parameters, and what to report; None: nothing was to be decided.
    """
    asked = parameters.mixed_precision
    if asked.use_mixed_precision != "auto":
        return parameters, None
    kept = _kept(record)
    if kept is not None:
        decided = replace(asked, **kept)
        is_half = decided.use_mixed_precision and not decided.use_bfloat16
        words = "fp16" if is_half else _words(kept["use_mixed_precision"])
        return with_precision(parameters, decided), f"{_FIELD}: {words}, which the checkpoint was trained with."
    is_low, note = _choose(kind, computes_in_bf16)
    return with_precision(parameters, replace(asked, use_mixed_precision=is_low, use_bfloat16=is_low)), note


def agreed_precision(
    parameters: Parameters, mesh: Mesh, record: Mapping[str, Any] | None
) -> tuple[Parameters, str | None]:
    """`settled_precision` as rank 0 decides it, also for ranks that measure other rates; all must call this.

    They would measure a machine that all of them load, and ranks with different types would be refused.
    """
    is_known = mesh.rank == 0 or _kept(record) is not None  # without a measurement
    decided, note = settled_precision(parameters, mesh.device.type, record) if is_known else (parameters, None)
    is_low = bool(gather_numbers(mesh, float(decided.mixed_precision.use_mixed_precision is True))[0])
    asked = replace(parameters.mixed_precision, use_mixed_precision=is_low, use_bfloat16=is_low)
    return (decided if is_known else with_precision(parameters, asked)), note


def _kept(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The fields that auto decides, as a checkpoint was trained with them; None: there is none."""
    earlier = ((record or {}).get("parameters") or {}).get("mixed_precision", {})
    if not isinstance(earlier.get("use_mixed_precision"), bool):
        return None
    return {name: earlier[name] for name in ("use_mixed_precision", "use_bfloat16", "loss_scale") if name in earlier}


def with_precision(parameters: Parameters, decided: MixedPrecision) -> Parameters:
    """Parameters with a precision that was decided before, in every round that leaves it open."""
    rounds = tuple(with_precision(one, decided) for one in parameters.next_rounds)
    asked = parameters.mixed_precision
    if asked.use_mixed_precision == "auto":
        asked = replace(decided, float8=asked.float8)
    return replace(parameters, mixed_precision=asked, next_rounds=rounds)


def _choose(kind: str, computes_in_bf16: bool | None) -> tuple[bool, str]:
    if kind == "cuda":
        is_low = computes_in_bf16
        if is_low is None:
            is_low = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
        why = "which the GPU computes in" if is_low else "since the GPU does not compute in bf16"
        return is_low, f"{_FIELD}: {_words(is_low)}, {why}."
    device = torch.device("cpu")
    exact, low = (matmul_rate(device, dtype, _SECONDS) for dtype in (torch.float32, torch.bfloat16))
    is_low = low >= LEAST_SPEEDUP * exact
    return is_low, (
        f"{_FIELD}: {_words(is_low)}, since matmuls reach {format_operations(low)}/s in bf16 and "
        f"{format_operations(exact)}/s in fp32 on this CPU, {low / exact:.2f} times; bf16 is chosen from "
        f"{LEAST_SPEEDUP:g} on."
    )


def _words(is_low: bool) -> str:
    return "bf16" if is_low else "the model's own types"
