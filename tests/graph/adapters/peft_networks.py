"""Tiny transformers and the layers that PEFT adapts in them, with inputs: Llama, Qwen, BERT, ViT, T5, Whisper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.lowering.language_models import IMAGES, MASK, TOKENS, Logits, bert, llama, vit


@dataclass(frozen=True)
class Network:
    """What is adapted.

    Attributes:
        make: builds it, as a module of which `inner` is the network of `transformers`.
        inputs: by place.
        targets: what PEFT adapts.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    targets: list[str]


def _qwen() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    return Logits(Qwen2ForCausalLM(config), ("input_ids",), {"use_cache": False})


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config: Any = T5Config(  # type: ignore[call-arg]
        vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return Logits(T5ForConditionalGeneration(config), ("input_ids", "decoder_input_ids"), {"use_cache": False})


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config: Any = WhisperConfig(
        vocab_size=50, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=12,
        max_target_positions=16, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    names = ("input_features", "decoder_input_ids")
    return Logits(WhisperForConditionalGeneration(config), names, {"use_cache": False})


SOUND = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(2))
NETWORKS: dict[str, Network] = {
    "llama": Network(llama, (TOKENS,), ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "vit": Network(vit, (IMAGES,), ["q_proj", "v_proj", "fc1", "projection"]),
    "bert": Network(bert, (TOKENS, MASK), ["query", "value", "attention.output.dense"]),
    "qwen": Network(_qwen, (TOKENS,), ["q_proj", "v_proj", "up_proj"]),
    "t5": Network(_t5, (TOKENS, TOKENS[:, :5]), ["q", "v", "wo"]),
    "whisper": Network(_whisper, (SOUND, TOKENS), ["q_proj", "v_proj", "fc2"]),
}
