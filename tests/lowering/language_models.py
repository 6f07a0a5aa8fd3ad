"""Tiny transformers built at random from `transformers`, with inputs: GPT-2, BERT, Llama, ViT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Logits(nn.Module):
    """A network of `transformers` that takes tensors by place and gives only its logits."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...], options: dict[str, Any]) -> None:
        super().__init__()
        self.inner = inner
        self.names = names
        self.options = options

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.inner(**dict(zip(self.names, inputs, strict=True)), **self.options).logits


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return Logits(GPT2LMHeadModel(config), ("input_ids",), {"use_cache": False})


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return Logits(BertForMaskedLM(config), ("input_ids", "attention_mask"), {})


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    return Logits(LlamaForCausalLM(config), ("input_ids",), {"use_cache": False})


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(  # type: ignore[call-arg]
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    return Logits(ViTForImageClassification(config), ("pixel_values",), {})


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], tuple[int, ...]]] = {
    "gpt2": (gpt2, (TOKENS,), (0, 1)),
    "bert": (bert, (TOKENS, MASK), (0, 1)),
    "llama": (llama, (TOKENS,), (0, 1)),
    "vit": (vit, (IMAGES,), (0,)),
}
"""Name -> how it is built, its inputs, and the axes whose size may change."""
