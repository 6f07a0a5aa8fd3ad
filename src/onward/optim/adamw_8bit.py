"""AdamW with moments in 8 bits, by torchao, which is an optional package."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from onward.errors import ParametersError


def make_adamw_8bit(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """torchao's AdamW8bit, with the state that it would make in the first update.

    Weights of 4096 or more elements, a multiple of 256, have moments of one byte an element and one float32 for every
    256 elements in a row; those of other weights are float32.

    Raises:
        ParametersError: torchao is not installed.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ParametersError(
            "optimizer.training_optimizer_name is AdamW8bit, which needs the package torchao. Install it with "
            f"`pip install 'onward[torchao]'`, or set AdamW. ({error})"
        ) from error

    class EightBit(AdamW8bit):  # type: ignore[misc]
        """Takes learning rates as numbers, and compiles for GPUs only."""

        def step(self, closure: Any = None) -> Any:
            """One update."""
            on_cpu = all(weight.device.type == "cpu" for group in self.param_groups for weight in group["params"])
            for group in self.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
            # Compiling for a CPU takes far longer than it saves.
            with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
                return super().step(closure)

    optimizer: Any = EightBit(groups)
    for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
        moments = {"exp_avg": optimizer._new_buffer(weight, True), "exp_avg_sq": optimizer._new_buffer(weight, False)}
        optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
    made: torch.optim.Optimizer = optimizer
    return made
