"""The options that transformers share: a size that stands for five numbers, each of which can be given by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onward.errors import ParametersError
from onward.models.reference_model import ModelOptions, check_options, option


@dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """What a named size stands for."""

    layers: int
    heads: int
    width: int
    vocab_size: int
    context_length: int


@dataclass(frozen=True, kw_only=True)
class TransformerOptions(ModelOptions):
    """Options of a transformer. Those left at None follow the size."""

    SIZES: ClassVar[dict[str, TransformerSize]]
    size: str
    layers: int | None = option(None, "transformer layers (default: by size)", minimum=1)
    heads: int | None = option(None, "attention heads; must divide the width (default: by size)", minimum=1)
    width: int | None = option(None, "width of the hidden states (default: by size)", minimum=1)
    vocab_size: int | None = option(None, "tokens in the vocabulary (default: by size)", minimum=1)
    context_length: int | None = option(None, "longest sequence (default: by size)", minimum=1)
    dropout: float = option(0.1, "dropout ratio of embeddings, attention and residuals", minimum=0, below=1)

    def __post_init__(self) -> None:
        check_options(self)
        shape = self.shape
        if shape.width % shape.heads:
            fitting = [str(heads) for heads in range(1, shape.width + 1) if shape.width % heads == 0][:12]
            raise ParametersError(
                f"width {shape.width} cannot be split into {shape.heads} heads; "
                f"choose a number of heads that divides it ({', '.join(fitting)}) or another width."
            )

    @property
    def shape(self) -> TransformerSize:
        """The numbers in force: those given, the others by size."""
        size = self.SIZES[self.size]
        return TransformerSize(
            layers=size.layers if self.layers is None else self.layers,
            heads=size.heads if self.heads is None else self.heads,
            width=size.width if self.width is None else self.width,
            vocab_size=size.vocab_size if self.vocab_size is None else self.vocab_size,
            context_length=size.context_length if self.context_length is None else self.context_length,
        )
