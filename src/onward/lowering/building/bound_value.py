"""What an ONNX value is while its program is built: a tensor in the code, a value in Python, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from onward.lowering.kernels.host import flatten


@dataclass(kw_only=True)
class BoundValue:
    """One ONNX value while the program is built: as a tensor, as a host value, or both."""

    tensor: fx.Node | None = None
    host: Any = None
    has_host: bool = False
    dtype: torch.dtype | None = None
    owned: bool = False

    @property
    def known(self) -> bool:
        """Whether the host value is known now, before anything runs."""
        return self.has_host and not holds_node(self.host)

    @property
    def is_cheap_on_host(self) -> bool:
        """Whether the value exists on the host only, or is a single number known now."""
        if self.tensor is None:
            return self.has_host
        return self.known and len(flatten(self.host)) == 1


def holds_node(value: Any) -> bool:
    """Whether a host value is, or holds, something that is only known when the program runs."""
    if isinstance(value, tuple | list):
        return any(holds_node(item) for item in value)
    return isinstance(value, fx.Node)
