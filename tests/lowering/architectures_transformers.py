"""Tiny instances of the architectures of `transformers`: decoders, encoders, both, state space.

Each is made by configuration alone, with random weights; nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.lowering.architecture import Architecture

TOKENS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])


class Picked(nn.Module):
    """A network of `transformers` that takes tensors by place and gives chosen fields of its output."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...], fields: tuple[str, ...], options: dict[str, Any]):
        super().__init__()
        self.inner = inner
        self.names = names
        self.fields = fields
        self.options = options

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        output = self.inner(**dict(zip(self.names, inputs, strict=True)), **self.options)
        found = tuple(getattr(output, field) for field in self.fields)
        return found[0] if len(found) == 1 else found


@dataclass(frozen=True)
class Made:
    """Builds a class of `transformers` from its configuration class; called, gives the module.

    Attributes:
        model: the class.
        names: the arguments that the inputs are, in their order.
        fields: of its output, to be given.
        options: further arguments of the forward.
        settings: of the configuration.
    """

    model: str
    names: tuple[str, ...]
    fields: tuple[str, ...]
    options: dict[str, Any]
    settings: dict[str, Any]

    def __call__(self) -> nn.Module:
        import transformers

        kind = getattr(transformers, self.model)
        return Picked(kind(kind.config_class(**self.settings)), self.names, self.fields, self.options)


def made(
    model: str,
    names: tuple[str, ...],
    fields: tuple[str, ...] = ("logits",),
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Made:
    """`model` of `transformers`, from its configuration class."""
    return Made(model, names, fields, options or {}, settings)


SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
GROUPED: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
"""The exporter's decomposition of the fused attention cannot view what it made of an attention with added biases."""
DECODER: tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]] = (("input_ids",), ("logits",), {"use_cache": False})
MASKED = (("input_ids", "attention_mask"),)


def _decoder(
    name: str, model: str, opset: int = 18, slow: bool = True, axes: tuple[int, ...] = (0, 1), **settings: Any
) -> Architecture:
    return Architecture(name, made(model, *DECODER, **settings), (TOKENS,), opset=opset, axes=axes, slow=slow)


def _encoder(
    name: str, model: str, opset: int = 18, slow: bool = True, axes: tuple[int, ...] = (0, 1), **settings: Any
) -> Architecture:
    module = made(model, *MASKED, **settings)
    return Architecture(name, module, (TOKENS, MASK), opset=opset, axes=axes, slow=slow)


DECODERS = (
    _decoder("gpt2", "GPT2LMHeadModel", vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2),
    _decoder(
        "gpt_neo",
        "GPTNeoForCausalLM",
        20,
        vocab_size=50,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    _decoder("gpt_neox", "GPTNeoXForCausalLM", 21, **SIZES),
    _decoder("gptj", "GPTJForCausalLM", vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, rotary_dim=4),
    _decoder("llama", "LlamaForCausalLM", slow=False, **GROUPED),
    _decoder("mistral", "MistralForCausalLM", 23, **GROUPED, sliding_window=4),
    _decoder(
        "mixtral",
        "MixtralForCausalLM",
        **GROUPED,
        num_local_experts=2,
        num_experts_per_tok=1,
        experts_implementation="batched_mm",
    ),
    _decoder("qwen2", "Qwen2ForCausalLM", 22, **GROUPED),
    _decoder("qwen3", "Qwen3ForCausalLM", 20, **GROUPED, head_dim=8),
    _decoder("gemma", "GemmaForCausalLM", **GROUPED, head_dim=8),
    _decoder("gemma2", "Gemma2ForCausalLM", 23, **GROUPED, head_dim=8, sliding_window=4),
    _decoder("phi", "PhiForCausalLM", **SIZES),
    _decoder("phi3", "Phi3ForCausalLM", 20, **GROUPED, pad_token_id=0),
    _decoder("stablelm", "StableLmForCausalLM", 21, **GROUPED),
    _decoder("olmo2", "Olmo2ForCausalLM", **GROUPED),
    _decoder("cohere", "CohereForCausalLM", **GROUPED),
    _decoder(
        "opt",
        "OPTForCausalLM",
        21,
        vocab_size=50,
        hidden_size=16,
        word_embed_proj_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=24,
        max_position_embeddings=32,
    ),
    _decoder("bloom", "BloomForCausalLM", slow=False, vocab_size=50, hidden_size=16, n_layer=2, n_head=2),
    _decoder("mpt", "MptForCausalLM", 20, vocab_size=50, d_model=16, n_layers=2, n_heads=2, max_seq_len=32),
    _decoder(
        "falcon", "FalconForCausalLM", 22, vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    ),
    _decoder(
        "mamba",
        "MambaForCausalLM",
        slow=False,
        axes=(0,),
        vocab_size=50,
        hidden_size=8,
        state_size=4,
        num_hidden_layers=2,
    ),
    _decoder(
        "rwkv", "RwkvForCausalLM", axes=(0,), vocab_size=50, hidden_size=8, num_hidden_layers=2, context_length=16
    ),
    _decoder(
        "mamba2",
        "Mamba2ForCausalLM",
        vocab_size=50,
        hidden_size=8,
        state_size=4,
        num_hidden_layers=2,
        head_dim=4,
        num_heads=4,
        n_groups=1,
        chunk_size=4,
    ),
    _decoder("xglm", "XGLMForCausalLM", vocab_size=50, d_model=16, num_layers=2, attention_heads=2, ffn_dim=24),
    _decoder(
        "codegen", "CodeGenForCausalLM", vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=4, rotary_dim=4
    ),
)

ENCODERS = (
    _encoder("bert", "BertForMaskedLM", **SIZES),
    _encoder("roberta", "RobertaForMaskedLM", 20, **SIZES),
    _encoder("distilbert", "DistilBertForMaskedLM", vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=24),
    _encoder("albert", "AlbertForMaskedLM", slow=False, **SIZES, embedding_size=8),
    _encoder("electra", "ElectraForMaskedLM", 21, **SIZES, embedding_size=8),
    _encoder(
        "deberta_v2",
        "DebertaV2ForMaskedLM",
        slow=False,
        **SIZES,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    _encoder("deberta", "DebertaForMaskedLM", **SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _encoder("mobilebert", "MobileBertForMaskedLM", **SIZES, embedding_size=8, intra_bottleneck_size=8),
    _encoder("squeezebert", "SqueezeBertForMaskedLM", **{**SIZES, "embedding_size": 16}),
    _encoder("mpnet", "MPNetForMaskedLM", 20, **SIZES),
    _encoder("fnet", "FNetForMaskedLM", axes=(0,), **SIZES, pad_token_id=0),
    _encoder("convbert", "ConvBertForMaskedLM", **SIZES, embedding_size=16, conv_kernel_size=3, head_ratio=1),
    _encoder("roformer", "RoFormerForMaskedLM", **SIZES, embedding_size=16),
    _encoder(
        "modernbert",
        "ModernBertForMaskedLM",
        23,
        **SIZES,
        pad_token_id=0,
        local_attention=4,
        global_attn_every_n_layers=2,
    ),
)

PAIRED = (
    Architecture(
        "t5",
        made(
            "T5ForConditionalGeneration",
            ("input_ids", "decoder_input_ids"),
            options={"use_cache": False},
            vocab_size=50,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            relative_attention_num_buckets=8,
            feed_forward_proj="gated-gelu",
            **EAGER,
        ),
        (TOKENS, TOKENS[:, :4]),
        axes=(0,),
    ),
    Architecture(
        "t5_encoder",
        made(
            "T5EncoderModel",
            ("input_ids", "attention_mask"),
            ("last_hidden_state",),
            vocab_size=50,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            relative_attention_num_buckets=8,
            **EAGER,
        ),
        (TOKENS, MASK),
        opset=20,
        axes=(0, 1),
        slow=True,
    ),
    Architecture(
        "bart",
        made(
            "BartForConditionalGeneration",
            ("input_ids", "decoder_input_ids"),
            options={"use_cache": False},
            vocab_size=50,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=32,
        ),
        (TOKENS, TOKENS[:, :4]),
        axes=(0,),
        slow=True,
    ),
)

LANGUAGE = (*DECODERS, *ENCODERS, *PAIRED)
