"""`AdaptedWeight`: a frozen weight, and the two small matrices whose product is added to it wherever it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onward.graph.adapters.uses import Reading

LORA_A, LORA_B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
"""What the trained tensors of an adapter are called, after the name of the weight and a dot."""

FACTOR = "lora_factor"
"""What ONNX Runtime's adapters have instead of a magnitude: the magnitude over the norm of the adapted weight."""


@dataclass(frozen=True, kw_only=True)
class AdaptedWeight:
    """`W + scale * B A` of a weight [..., outputs, inputs], A [..., rank, inputs] and B [..., outputs, rank].

    Attributes:
        weight: name of its initializer.
        shape: of the weight; of a packed one, that of the matrix it stands for.
        rank: of the product.
        scale: of the product.
        reading: what the first node that reads the weight does with it.
        outputs_first: whether the weight is stored [..., outputs, inputs]; else [..., inputs, outputs].
        has_magnitude: whether the norm of each output's weights is trained, too (DoRA).
        is_residual: whether the frozen weight is what is left of the stored one without what the adapter began as.
        rate_factor_of_b: multiplies the learning rate of B (LoRA+).
    """

    weight: str
    shape: tuple[int, ...]
    rank: int
    scale: float
    reading: Reading
    outputs_first: bool
    has_magnitude: bool
    is_residual: bool = False
    rate_factor_of_b: float = 1.0

    @property
    def a(self) -> str:
        """Name of A."""
        return f"{self.weight}.{LORA_A}"

    @property
    def b(self) -> str:
        """Name of B."""
        return f"{self.weight}.{LORA_B}"

    @property
    def magnitude(self) -> str:
        """Name of the trained norms."""
        return f"{self.weight}.{MAGNITUDE}"

    @property
    def factor(self) -> str:
        """Name of the trained norms over those of the adapted weight."""
        return f"{self.weight}.{FACTOR}"

    @property
    def names(self) -> tuple[str, ...]:
        """Of everything that is trained."""
        return (self.a, self.b, *([self.magnitude] if self.has_magnitude else []))

    @property
    def is_flat(self) -> bool:
        """Whether the weight is more than a stack of matrices: a kernel, a matrix of its first axis and the rest."""
        return self.reading is Reading.CONVOLUTION or len(self.shape) > 3

    @property
    def matrix(self) -> tuple[int, int]:
        """Outputs and inputs."""
        if self.is_flat:
            return self.shape[0], math.prod(self.shape[1:])
        rows, columns = self.shape[-2:]
        return (rows, columns) if self.outputs_first else (columns, rows)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of everything that is trained, as PEFT has it: A of a convolution is one, and B one with a kernel of 1."""
        outputs, inputs = self.matrix
        batch = () if self.is_flat else self.shape[:-2]
        a, b = (*batch, self.rank, inputs), (*batch, outputs, self.rank)
        if self.reading is Reading.CONVOLUTION:
            a, b = (self.rank, *self.shape[1:]), (outputs, self.rank, *(1 for _ in self.shape[2:]))
        every = {self.a: a, self.b: b, self.magnitude: (*batch, outputs)}
        return {name: every[name] for name in self.names}

    @property
    def rank_axes(self) -> dict[str, int]:
        """The axis of A and B that has the size of the rank."""
        if self.reading is Reading.CONVOLUTION:
            return {self.a: 0, self.b: 1}
        axes = len(self.shapes[self.a])
        return {self.a: axes - 2, self.b: axes - 1}
