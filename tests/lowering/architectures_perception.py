"""Tiny instances of the architectures of `transformers` that see and hear: vision, image and text, speech."""

from __future__ import annotations

from typing import Any

import torch

from tests.lowering.architecture import Architecture
from tests.lowering.architectures_transformers import EAGER, MASK, SIZES, TOKENS, made

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
WAVES = torch.randn(2, 400, generator=torch.Generator().manual_seed(2))
SPECTRA = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(3))

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
SPEECH: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}


def _vision(name: str, model: str, opset: int = 18, slow: bool = True, **settings: Any) -> Architecture:
    module = made(model, ("pixel_values",), **settings)
    return Architecture(name, module, (IMAGES,), opset=opset, axes=(0,), slow=slow)


IMAGE_NETS = (
    _vision("vit", "ViTForImageClassification", **VISION),
    _vision("deit", "DeiTForImageClassification", 20, **VISION),
    _vision("beit", "BeitForImageClassification", **VISION, use_relative_position_bias=True, **EAGER),
    _vision(
        "swin",
        "SwinForImageClassification",
        slow=False,
        **EAGER,
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        num_labels=5,
    ),
    _vision(
        "swinv2",
        "Swinv2ForImageClassification",
        20,
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
        num_labels=5,
    ),
    _vision(
        "convnext", "ConvNextForImageClassification", hidden_sizes=[4, 8], depths=[1, 2], num_stages=2, num_labels=5
    ),
    _vision(
        "convnextv2",
        "ConvNextV2ForImageClassification",
        21,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        num_stages=2,
        num_labels=5,
    ),
    _vision(
        "segformer",
        "SegformerForSemanticSegmentation",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[4, 2],
        hidden_sizes=[4, 8],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        num_labels=5,
    ),
    _vision(
        "mobilevit",
        "MobileViTForImageClassification",
        hidden_sizes=[8, 8, 8],
        neck_hidden_sizes=[4, 4, 4, 8, 8, 8, 16],
        num_attention_heads=2,
        image_size=32,
        num_labels=5,
    ),
    _vision(
        "efficientnet",
        "EfficientNetForImageClassification",
        width_coefficient=0.25,
        depth_coefficient=0.1,
        in_channels=[32, 16],
        out_channels=[16, 24],
        kernel_sizes=[3, 5],
        strides=[1, 2],
        num_block_repeats=[1, 2],
        expand_ratios=[1, 2],
        depthwise_padding=[1],
        hidden_dim=320,
        image_size=32,
        num_labels=5,
    ),
    _vision(
        "regnet",
        "RegNetForImageClassification",
        20,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        groups_width=4,
        num_labels=5,
    ),
    _vision(
        "resnet", "ResNetForImageClassification", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_labels=5
    ),
    _vision(
        "mobilenet_v2",
        "MobileNetV2ForImageClassification",
        slow=False,
        depth_multiplier=0.1,
        depth_divisible_by=4,
        min_depth=4,
        num_labels=5,
    ),
    _vision("dinov2", "Dinov2ForImageClassification", 23, **{**VISION, "mlp_ratio": 2}),
    _vision(
        "poolformer", "PoolFormerForImageClassification", hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 1, 1], num_labels=5
    ),
    _vision(
        "pvt",
        "PvtForImageClassification",
        image_size=32,
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
        num_labels=5,
    ),
    Architecture(
        "clip",
        made(
            "CLIPModel",
            ("input_ids", "pixel_values", "attention_mask"),
            ("logits_per_image",),
            text_config={**SIZES, "projection_dim": 8, "eos_token_id": 2},
            vision_config={**VISION, "projection_dim": 8},
            projection_dim=8,
        ),
        (TOKENS, IMAGES, MASK),
        slow=True,
    ),
)

AUDIO = (
    Architecture("wav2vec2", made("Wav2Vec2ForCTC", ("input_values",), **SPEECH), (WAVES,), axes=(0,)),
    Architecture(
        "hubert",
        made("HubertForCTC", ("input_values",), **SPEECH, feat_extract_norm="layer", conv_bias=True),
        (WAVES,),
        opset=20,
        axes=(0,),
        slow=True,
    ),
    Architecture(
        "whisper",
        made(
            "WhisperForConditionalGeneration",
            ("input_features", "decoder_input_ids"),
            options={"use_cache": False},
            vocab_size=50,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=2,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=10,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        (SPECTRA, TOKENS[:, :4]),
        axes=(0,),
        slow=True,
    ),
    Architecture(
        "audio_spectrogram",
        made(
            "ASTForAudioClassification",
            ("input_values",),
            **{k: v for k, v in VISION.items() if k != "image_size"},
            max_length=24,
            num_mel_bins=16,
            frequency_stride=8,
            time_stride=8,
        ),
        (torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(5)),),
        axes=(0,),
        slow=True,
    ),
)

PERCEPTION = (*IMAGE_NETS, *AUDIO)
