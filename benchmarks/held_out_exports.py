"""Models for `benchmarks.held_out_layouts` and what they are fed: styles of many libraries, classes of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from tests.parallel.horizontal_models import exported
from torch import Tensor, nn

from benchmarks.held_out_models import (
    Attention,
    Block,
    ConvNextV2,
    Experts,
    Language,
    LatentAttention,
    Mamba2,
    Mlp,
    Parallel,
    Recurrent,
    TwoTowers,
    VisionTransformer,
)

WORDS, TOKENS = 96, 8


@dataclass(frozen=True)
class HeldOut:
    """A model and its inputs: int64 words or float32 features of these shapes, without the batch.

    Attributes:
        make: the module with so many layers.
        inputs: name -> shape of a sample.
        labels: how many classes, and the shape of a sample's labels; None: each sample is its own class.
    """

    make: Callable[[int], nn.Module]
    inputs: Mapping[str, tuple[int, ...]]
    labels: tuple[int, tuple[int, ...]] | None = (WORDS, (TOKENS,))

    def model(self, layers: int = 2) -> ir.Model:
        """What torch exports."""
        torch.manual_seed(0)
        given = tuple(torch.from_numpy(array) for array in self.features(4).values())
        return exported(self.make(layers), given, (0,))

    def features(self, samples: int) -> dict[str, np.ndarray[Any, Any]]:
        """Of so many samples; words are integers."""
        draw = np.random.default_rng(0)
        return {
            name: draw.integers(0, WORDS, (samples, *shape))
            if name in ("tokens", "words")
            else draw.standard_normal((samples, *shape), dtype=np.float32)
            for name, shape in self.inputs.items()
        }

    def data(self, samples: int) -> dict[str, np.ndarray[Any, Any]]:
        """Features and labels."""
        if self.labels is None:
            return {**self.features(samples), "labels": np.arange(samples) % 4}
        return {
            **self.features(samples),
            "labels": np.random.default_rng(1).integers(0, self.labels[0], (samples, *self.labels[1])),
        }


def language(*makers: Callable[[], nn.Module]) -> HeldOut:
    """A language model of so many blocks of attention and MLP, or of one module for both."""

    def block() -> nn.Module:
        return makers[0]() if len(makers) == 1 else Block(makers[0](), makers[1]())

    return HeldOut(lambda layers: Language(*(block() for _ in range(layers))), {"tokens": (TOKENS,)})


def two_towers(style: str, bias: int) -> HeldOut:
    """Two towers for words and patches."""
    inputs = {"tokens": (TOKENS,), "patches": (TOKENS, 16)}
    return HeldOut(lambda layers: TwoTowers(style, bool(bias)), inputs, None)


class OfTransformers(nn.Module):
    """A class of transformers that gives only its logits: of tokens, or of tokens and the words of a decoder."""

    def __init__(self, name: str, config: str, **fields: Any) -> None:
        import transformers

        super().__init__()
        options = {"pad_token_id": 0, "use_cache": False, "experts_implementation": "batched_mm"}
        made = getattr(transformers, config)(**fields, **options)
        self.inner = getattr(transformers, name)(made).eval()
        for parameter in self.inner.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)

    def forward(self, tokens: Tensor, words: Tensor | None = None) -> Tensor:
        more = {} if words is None else {"decoder_input_ids": words}
        logits: Tensor = self.inner(input_ids=tokens, use_cache=False, **more).logits
        return logits


class MixtureOfLlama4(nn.Module):
    """Of transformers; its attention rotates complex numbers, which torch's exporter refuses."""

    def __init__(self) -> None:
        from transformers import Llama4TextConfig
        from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

        super().__init__()
        config = Llama4TextConfig(hidden_size=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=1)
        self.inner = Llama4TextMoe(config)
        for parameter in self.inner.parameters():
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)[0].view(x.shape)
        return result


def decoder(name: str, config: str, **fields: Any) -> HeldOut:
    """A decoder-only language model of transformers."""
    sizes = {
        "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 32,
    }  # fmt: skip
    return HeldOut(
        lambda layers: OfTransformers(name, config, **{**sizes, **fields}, num_hidden_layers=layers),
        {"tokens": (TOKENS,)},
    )


def encoder_decoder(name: str, config: str, count: tuple[str, ...], **fields: Any) -> HeldOut:
    """An encoder-decoder of transformers, whose fields in `count` are the layers."""
    return HeldOut(
        lambda layers: OfTransformers(name, config, **fields, vocab_size=WORDS, **dict.fromkeys(count, layers)),
        {"tokens": (TOKENS,), "words": (TOKENS,)},
    )


IMAGES = {"x": (3, 8, 8)}
ATTENTIONS = {
    "MHA": (8, 8, "separate"), "GQA 4": (8, 4, "separate"), "GQA 2": (8, 2, "separate"), "MQA": (8, 1, "separate"),
    "MHA split": (8, 8, "split"), "GQA 2 split": (8, 2, "split"), "MQA split": (8, 1, "split"),
    "GPT-NeoX": (8, 8, "neox"), "Bloom": (8, 8, "bloom"), "Falcon 4": (8, 4, "falcon"), "Falcon 2": (8, 2, "falcon"),
    "permuted": (8, 8, "permute"),
}  # fmt: skip
MODELS = {
    **{name: language(partial(Attention, *given), Mlp) for name, given in ATTENTIONS.items()},
    **{f"gates {gate}": language(Attention, partial(Mlp, gate)) for gate in ("halves", "strided", "viewed")},
    "GPT-J": language(partial(Parallel, key_heads=8)),
    "PaLM": language(Parallel),
    "PaLM GQA 2": language(partial(Parallel, key_heads=2)),
    "MLA": language(LatentAttention, Mlp),
    "MoE top-2": language(Attention, Experts),
    "MLA + MoE": language(LatentAttention, Experts),
    "Mamba2": language(Mamba2, Mlp),
    "Mamba2 + MoE": language(Mamba2, Experts),
    "Gemma 3": decoder("Gemma3ForCausalLM", "Gemma3TextConfig", sliding_window=4, sliding_window_pattern=2),
    "Mixtral": decoder("MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
    "GPT-OSS": decoder(
        "GptOssForCausalLM",
        "GptOssConfig",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
    ),
    "Llama 4's mixture": language(Attention, MixtureOfLlama4),
    "DeepSeek-V3": decoder(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        num_key_value_heads=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=0,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=2,
        qk_nope_head_dim=4,
        v_head_dim=4,
        head_dim=2,
    ),
    "Qwen2-MoE": decoder(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "T5": encoder_decoder(
        "T5ForConditionalGeneration",
        "T5Config",
        ("num_layers",),
        d_model=32,
        d_kv=4,
        d_ff=64,
        num_heads=8,
        dropout_rate=0.0,
        attn_implementation="eager",
    ),
    "BART": encoder_decoder(
        "BartForConditionalGeneration",
        "BartConfig",
        ("encoder_layers", "decoder_layers"),
        d_model=32,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "LSTM": HeldOut(lambda layers: Recurrent(), {"tokens": (TOKENS,)}),
    "GRU, both ways": HeldOut(lambda layers: Recurrent(nn.GRU, both=True), {"tokens": (TOKENS,)}),
    "ViT": HeldOut(lambda layers: VisionTransformer(layers), IMAGES, (10, ())),
    "ConvNeXt-V2": HeldOut(lambda layers: ConvNextV2(layers), IMAGES, (10, ())),
    **{
        f"two towers, {style}{' + bias' * bias}": two_towers(style, bias)
        for style in ("mean", "first")
        for bias in (0, 1)
    },
}
MIXTURES = (
    "MoE top-2",
    "MLA + MoE",
    "Mamba2 + MoE",
    "Mixtral",
    "GPT-OSS",
    "Llama 4's mixture",
    "DeepSeek-V3",
    "Qwen2-MoE",
)
"""Models with experts."""
MEGATRON = {"MHA": 4, "GQA 4": 4, "GQA 2": 4, "MQA": 4, "MQA split": 4, "GPT-J": 2, "PaLM": 2, "MLA": 4, "MoE top-2": 4,
            "Mamba2": 4, "ViT": 4}  # fmt: skip
"""All-reduces of a layer forward and backward: one each way for attention (or scan) and for MLP, or for both."""

LOSS = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"}
