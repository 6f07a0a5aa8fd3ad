"""Networks that no kernel of onward was chosen by: what `benchmarks.census --held-out` trains.

Made by the configuration classes of `transformers`, with random weights, none of them in the coverage table. Whoever
changes a limit or a kernel for one of them moves it to the table, and takes another for it.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.lowering.architecture import Architecture
from tests.lowering.architectures_transformers import made

TOKENS = torch.randint(3, 1000, (2, 64), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(TOKENS).index_fill(1, torch.arange(56, 64), 0)
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
SOUND = torch.randn(2, 1600, generator=torch.Generator().manual_seed(2))
SERIES = torch.randn(2, 64, 7, generator=torch.Generator().manual_seed(3))
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
PAIRED: dict[str, Any] = {
    "vocab_size": 1000,
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_position_embeddings": 128,
}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}


def _decoder(name: str, model: str, **settings: Any) -> Architecture:
    module = made(model, ("input_ids",), options={"use_cache": False}, **settings)
    return Architecture(name, module, (TOKENS,), axes=(0,))


def _encoder(name: str, model: str, **settings: Any) -> Architecture:
    return Architecture(name, made(model, ("input_ids", "attention_mask"), **settings), (TOKENS, MASK), axes=(0,))


def _pair(name: str, model: str, **settings: Any) -> Architecture:
    module = made(model, ("input_ids", "decoder_input_ids"), options={"use_cache": False}, **settings)
    return Architecture(name, module, (TOKENS, TOKENS[:, :32]), axes=(0,))


def _vision(name: str, model: str, **settings: Any) -> Architecture:
    return Architecture(name, made(model, ("pixel_values",), num_labels=10, **settings), (IMAGES,), axes=(0,))


def _series(name: str, model: str, **settings: Any) -> Architecture:
    module = made(model, ("past_values",), ("prediction_outputs",), prediction_length=16, context_length=64, **settings)
    return Architecture(name, module, (SERIES,), axes=(0,))


HELD_OUT = (
    _decoder("granite", "GraniteForCausalLM", **GROUPED),
    _decoder("starcoder2", "Starcoder2ForCausalLM", **GROUPED),
    _decoder("persimmon", "PersimmonForCausalLM", **SIZES),
    _decoder("glm", "GlmForCausalLM", **GROUPED, head_dim=32, pad_token_id=0),
    _decoder("nemotron", "NemotronForCausalLM", **GROUPED),
    _decoder("arcee", "ArceeForCausalLM", **GROUPED),
    _decoder("smollm3", "SmolLM3ForCausalLM", **GROUPED, pad_token_id=0),
    _decoder("diffllama", "DiffLlamaForCausalLM", **GROUPED),
    _decoder("gpt_bigcode", "GPTBigCodeForCausalLM", vocab_size=1000, n_positions=128, n_embd=128, n_layer=2, n_head=4),
    _decoder("biogpt", "BioGptForCausalLM", **SIZES),
    _encoder("esm", "EsmForMaskedLM", **SIZES, position_embedding_type="rotary", pad_token_id=1, mask_token_id=2),
    _encoder("data2vec_text", "Data2VecTextForMaskedLM", **SIZES, pad_token_id=1),
    _encoder("rembert", "RemBertForMaskedLM", **SIZES, input_embedding_size=64, output_embedding_size=64),
    _encoder("roberta_prelayernorm", "RobertaPreLayerNormForMaskedLM", **SIZES),
    _encoder("eurobert", "EuroBertForMaskedLM", **GROUPED, pad_token_id=0),
    _encoder("ibert", "IBertForMaskedLM", **SIZES),
    _pair("marian", "MarianMTModel", **PAIRED, pad_token_id=0, decoder_start_token_id=0),
    _pair("pegasus", "PegasusForConditionalGeneration", **PAIRED),
    _pair(
        "umt5",
        "UMT5ForConditionalGeneration",
        vocab_size=1000,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        **EAGER,
    ),
    _vision(
        "focalnet", "FocalNetForImageClassification", image_size=64, embed_dim=32, depths=[2, 2], hidden_sizes=[32, 64],
        focal_levels=[2, 2], focal_windows=[3, 3],
    ),
    _vision("bit", "BitForImageClassification", embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], num_groups=8),
    _vision("swiftformer", "SwiftFormerForImageClassification", image_size=64, depths=[1, 1], embed_dims=[32, 64]),
    _vision("mobilenet_v1", "MobileNetV1ForImageClassification", image_size=64, depth_multiplier=0.25, min_depth=8),
    _vision("hgnet_v2", "HGNetV2ForImageClassification"),
    _vision(
        "vit_msn", "ViTMSNForImageClassification", image_size=64, patch_size=8, hidden_size=128, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=256,
    ),
    Architecture(
        "wavlm",
        made(
            "WavLMForSequenceClassification",
            ("input_values",),
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            conv_dim=[32, 32, 64],
            conv_stride=[5, 2, 2],
            conv_kernel=[10, 3, 3],
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            num_labels=10,
            **EAGER,
        ),
        (SOUND,),
        axes=(0,),
    ),
    _series("patchtsmixer", "PatchTSMixerForPrediction", num_input_channels=7, patch_length=8, patch_stride=8),
    _series("patchtst", "PatchTSTForPrediction", num_input_channels=7, patch_length=8, patch_stride=8),
)  # fmt: skip
