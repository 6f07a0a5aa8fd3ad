"""Small models of many kinds for tensor parallelism: what they are built or exported from, and a batch for each."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.models import create_model

CROSS_ENTROPY = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")


@dataclass(frozen=True)
class Example:
    """A model, its loss, and the features of a batch by name; `planned` are sizes of another batch, for the plan.

    Attributes:
        make: builds the model.
        features: name -> tensor of a batch.
        planned: the same of the batch that the plan is made for: other sizes of open dimensions.
        loss: what is minimized.
        fuse: put one node instead of several where that is known.
    """

    make: Callable[[], ir.Model]
    features: Callable[[], dict[str, Tensor]]
    planned: Callable[[], dict[str, Tensor]]
    loss: LossSpec = CROSS_ENTROPY
    fuse: bool = False

    def graph(self, path: str | None = None) -> TrainingGraph:
        """The graph to train; of the model's file, if it was written."""
        return make_training_graph(
            self.make() if path is None else path, loss=self.loss, count_correct=True, fuse=self.fuse
        )


def exported(module: nn.Module, inputs: tuple[Tensor, ...], open_axes: tuple[int, ...], opset: int = 20) -> ir.Model:
    """What torch's exporter makes of a module with fresh weights, its one output called `logits`."""
    torch.manual_seed(0)
    shapes = tuple({a: torch.export.Dim.DYNAMIC for a in open_axes if a < x.dim()} for x in inputs)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module.eval(),
            inputs,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=shapes if open_axes else None,
            output_names=["logits"],
            verbose=False,
            optimize=False,
        )
    assert program is not None
    return randomize(ir.from_proto(program.model_proto))


class Logits(nn.Module):
    """A language model of `transformers` that gives only its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens, use_cache=False).logits


def llama(tied: bool) -> ir.Model:
    """Grouped heads, rotary positions, gated MLP, RMS norms."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=48, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return exported(Logits(LlamaForCausalLM(config)), (torch.zeros(2, 7, dtype=torch.int64),), (0, 1))


def transformers_gpt2() -> ir.Model:
    """Fused queries, keys and values; a tied output layer; an odd vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return exported(Logits(GPT2LMHeadModel(config)), (torch.zeros(2, 7, dtype=torch.int64),), (0, 1))


class FusedAttention(nn.Module):
    """Attention with one projection, seen as [batch, tokens, 3, heads, width], or with grouped heads by slices."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.grouped = grouped
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.joint = nn.Linear(32, 32 + 2 * 16 if grouped else 96, bias=not grouped)
        self.out = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        batch, tokens, _ = x.shape
        joint = self.joint(self.norm(x))
        if self.grouped:
            query, key, value = joint[..., :32], joint[..., 32:48], joint[..., 48:]
            query = query.reshape(batch, tokens, 8, 4).transpose(1, 2)
            key = key.reshape(batch, tokens, 4, 4).transpose(1, 2).repeat_interleave(2, 1)
            value = value.reshape(batch, tokens, 4, 4).transpose(1, 2).repeat_interleave(2, 1)
        else:
            query, key, value = joint.reshape(batch, tokens, 3, 8, 4).permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2) / 2.0).softmax(-1)
        merged = (scores @ value).transpose(1, 2).reshape(batch, tokens, 32)
        return self.head(x + self.out(merged)).transpose(1, 2)


class NormedHeads(nn.Module):
    """Queries normalized per head by one weight for all, one head of keys and values for all, an additive mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.query_norm = nn.LayerNorm(4)
        self.slopes = nn.Parameter(torch.linspace(0.1, 1.0, 8))
        self.register_buffer("far", torch.randn(1, 8, 1, 1))
        self.out = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        batch, tokens, _ = x.shape
        y = self.norm(x)
        query = self.query_norm(self.query(y).reshape(batch, tokens, 8, 4)).transpose(1, 2)
        key = self.key(y).reshape(batch, tokens, 1, 4).transpose(1, 2).expand(-1, 8, -1, -1)
        value = self.value(y).reshape(batch, tokens, 1, 4).transpose(1, 2)
        scores = query @ key.transpose(-1, -2) * self.slopes.reshape(1, 8, 1, 1) + self.far * 0.5  # type: ignore[operator]
        merged = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, tokens, 32)
        return self.head(x + self.out(merged)).transpose(1, 2)


class Shifted(nn.Module):
    """An MLP whose hidden features are moved by one, as padding on one side and cropping on the other does it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(16, 32), nn.Linear(32, 16)
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(nn.functional.pad(torch.tanh(self.first(x)), (1, -1)))
        x = x + self.narrow(torch.tanh(self.wide(x)))
        return self.head(x).transpose(1, 2)


class Residual(nn.Module):
    """A bottleneck with batch norm and a shortcut, as in ResNet."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.two = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.three = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.one(x)))
        y = F.relu(self.norm2(self.two(y)))
        return F.relu(self.norm3(self.three(y)) + self.short(x))


def residual_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), Residual(16, 8, 32, 2), Residual(32, 8, 32, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def inverted(inputs: int, width: int, outputs: int) -> nn.Module:
    """MobileNet's block: a wide depthwise convolution between two pointwise ones."""
    return nn.Sequential(
        nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6(),
        nn.Conv2d(width, width, 3, 1, 1, groups=width, bias=False), nn.BatchNorm2d(width), nn.Hardswish(),
        nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
    )  # fmt: skip


def depthwise_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), inverted(8, 32, 16), inverted(16, 64, 16),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 64), nn.Dropout(0.0), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


class UNet(nn.Module):
    """Two levels, skips joined by channels, group norm, transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = self._double(3, 16)
        self.down2 = self._double(16, 32)
        self.middle = self._double(32, 64)
        self.up2 = nn.ConvTranspose2d(64, 32, 2, 2)
        self.out2 = self._double(64, 32)
        self.up1 = nn.ConvTranspose2d(32, 16, 2, 2)
        self.out1 = self._double(32, 16)
        self.last = nn.Conv2d(16, 4, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        middle = self.middle(F.max_pool2d(two, 2))
        two = self.out2(torch.cat([two, self.up2(middle)], 1))
        return self.last(self.out1(torch.cat([one, self.up1(two)], 1)))


def randomize(model: ir.Model) -> ir.Model:
    """Other numbers in vectors of ones and zeros: exporters merge equal initializers, and zeros hide errors."""
    generator = np.random.default_rng(0)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype is ir.DataType.FLOAT and len(tensor.shape) == 1 and tensor.size > 3:
            numbers = 1 + 0.3 * generator.standard_normal(tensor.shape.numpy())
            value.const_value = ir.Tensor(np.abs(numbers).astype(np.float32), name=value.name)
    return model


def reference(name: str, **options: Any) -> ir.Model:
    """A reference model of onward."""
    return randomize(create_model(name, **options))


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], dict[str, Tensor]]:
    def draw() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(batch)
        shape = (batch, length)
        names = ("tokens", "input_ids", "labels")
        return {name: torch.randint(0, vocabulary, shape, generator=generator) for name in names}

    return draw


def bert_features(batch: int, length: int, masked: int) -> Callable[[], dict[str, Tensor]]:
    def draw() -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(batch)
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, -2:] = 0
        return {
            "input1": torch.randint(1, 96, (batch, length), generator=g),
            "input2": torch.randint(0, 2, (batch, length), generator=g),
            "input3": mask,
            "masked_lm_positions": torch.randint(0, length, (batch, masked), generator=g),
            "masked_lm_ids": torch.randint(0, 96, (batch, masked), generator=g),
            "next_sentence_labels": torch.randint(0, 2, (batch,), generator=g),
        }

    return draw


def images(
    batch: int, side: int, channels: int = 3, classes: int = 10, dense: bool = False
) -> Callable[[], dict[str, Tensor]]:
    def draw() -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(batch)
        x = torch.randn(batch, channels, side, side, generator=g)
        shape = (batch, side, side) if dense else (batch,)
        labels = torch.randint(0, classes, shape, generator=g)
        return {"x": x, "input": x, "images": x, "X": x, "labels": labels}

    return draw


def vectors(batch: int, length: int) -> Callable[[], dict[str, Tensor]]:
    def draw() -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(batch)
        return {
            "x": torch.randn(batch, length, 16, generator=g),
            "labels": torch.randint(0, 10, (batch, length), generator=g),
        }

    return draw


BY_CLASS_AXIS = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels", class_axis=1)
PREDICTIONS = LossSpec(type="softmax_cross_entropy", prediction="predictions", label="labels")
BERT = {"size": "tiny", "layers": 2, "heads": 4, "width": 32, "vocab_size": 96, "context_length": 16}
GPT2 = {**BERT, "dropout": 0.0}

EXAMPLES: dict[str, Example] = {
    "gpt2": Example(lambda: reference("gpt2", **GPT2), tokens(3, 5, 96), tokens(2, 7, 96)),
    "gpt2-wide": Example(
        lambda: reference("gpt2", **{**GPT2, "heads": 8, "layers": 1, "vocab_size": 97}),
        tokens(3, 8, 97),
        tokens(2, 16, 97),
    ),
    "gpt2-untied": Example(
        lambda: reference("gpt2", **{**GPT2, "tied_embedding": False, "vocab_size": 97}),
        tokens(3, 5, 97),
        tokens(2, 7, 97),
    ),
    "gpt2-opset13": Example(lambda: reference("gpt2", **{**GPT2, "opset": 13}), tokens(3, 5, 96), tokens(2, 7, 96)),
    "bert": Example(
        lambda: reference("bert", **{**BERT, "dropout": 0.0}),
        bert_features(3, 6, 2),
        bert_features(2, 7, 3),
        LossSpec(type="bert"),
    ),
    "llama": Example(lambda: llama(False), tokens(3, 5, 96), tokens(2, 7, 96)),
    "llama-tied": Example(lambda: llama(True), tokens(3, 5, 96), tokens(2, 7, 96)),
    "transformers-gpt2": Example(transformers_gpt2, tokens(3, 5, 97), tokens(2, 7, 97)),
    "fused-heads": Example(
        lambda: exported(FusedAttention(False), (torch.zeros(2, 7, 16),), (0, 1)),
        vectors(3, 5),
        vectors(2, 7),
        BY_CLASS_AXIS,
    ),
    "fused-grouped": Example(
        lambda: exported(FusedAttention(True), (torch.zeros(2, 7, 16),), (0, 1)),
        vectors(3, 5),
        vectors(2, 7),
        BY_CLASS_AXIS,
    ),
    "normed-heads": Example(
        lambda: exported(NormedHeads(), (torch.zeros(2, 7, 16),), (0, 1)), vectors(3, 5), vectors(2, 7), BY_CLASS_AXIS
    ),
    "shifted": Example(
        lambda: exported(Shifted(), (torch.zeros(2, 7, 16),), (0, 1)), vectors(3, 5), vectors(2, 7), BY_CLASS_AXIS
    ),
    "resnet": Example(
        lambda: exported(residual_network(), (torch.zeros(2, 3, 8, 8),), (0,)), images(3, 8), images(2, 8)
    ),
    "mobilenet": Example(
        lambda: exported(depthwise_network(), (torch.zeros(2, 3, 8, 8),), (0,)), images(3, 8), images(2, 8)
    ),
    "unet": Example(
        lambda: exported(UNet(), (torch.zeros(2, 3, 8, 8),), (0,)),
        images(3, 8, classes=4, dense=True),
        images(2, 8, classes=4, dense=True),
        BY_CLASS_AXIS,
    ),
    "squeezenet": Example(
        lambda: reference("squeezenet", image_size=32, classes=10, dropout=0.0), images(2, 32), images(3, 32)
    ),
    "mnist": Example(lambda: reference("mnist"), images(2, 28, 1), images(3, 28, 1), PREDICTIONS),
    "mnist-conv": Example(
        lambda: reference("mnist", variant="conv", dropout=0.0), images(2, 28, 1), images(3, 28, 1), PREDICTIONS
    ),
}

EXAMPLES |= {
    "gpt2-even": replace(EXAMPLES["gpt2"], features=tokens(3, 8, 96), planned=tokens(2, 12, 96)),
    "gpt2-untied-even": replace(EXAMPLES["gpt2-untied"], features=tokens(3, 8, 97), planned=tokens(2, 12, 97)),
    "bert-even": replace(EXAMPLES["bert"], features=bert_features(3, 8, 2), planned=bert_features(2, 12, 3)),
    "llama-even": replace(EXAMPLES["llama"], features=tokens(3, 8, 96), planned=tokens(2, 12, 96)),
    "normed-heads-even": replace(EXAMPLES["normed-heads"], features=vectors(3, 8), planned=vectors(2, 12)),
}
"""The same with sequences that four ranks can share by tokens."""

_LARGER = {**GPT2, "vocab_size": 260}
EXAMPLES |= {
    "gpt2-fused": Example(lambda: reference("gpt2", **_LARGER), tokens(3, 8, 260), tokens(2, 12, 260), fuse=True),
    "gpt2-dropout-fused": Example(
        lambda: reference("gpt2", **{**_LARGER, "dropout": 0.5}), tokens(3, 8, 260), tokens(2, 12, 260), fuse=True
    ),
    "bert-fused": replace(EXAMPLES["bert-even"], fuse=True),
    "llama-fused": replace(EXAMPLES["llama-even"], fuse=True),
}
"""The same after fusion; 260 classes are enough for the loss to be fused with the output layer."""


class InnerNorms(nn.Module):
    """Gated MLPs whose hidden features are normalized: by layer norm, by RMS norm, by responses (GRN)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(48, 32) for _ in range(3))
        self.layer_norm, self.rms_norm = nn.LayerNorm(48), nn.RMSNorm(48, eps=1e-5)
        self.scale, self.shift = nn.Parameter(torch.rand(48)), nn.Parameter(torch.rand(48))

    def responses(self, x: Tensor) -> Tensor:
        response = x.pow(2).sum(1, keepdim=True).sqrt()
        return self.scale * (x * (response / (response.mean(-1, keepdim=True) + 1e-3))) + self.shift + x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        inner: tuple[Callable[[Tensor], Tensor], ...] = (self.layer_norm, self.rms_norm, self.responses)
        for norm, wide, normalized, out in zip(self.norms, self.wide, inner, self.out, strict=True):
            up, gate = wide(norm(x)).chunk(2, -1)
            x = x + out(normalized(up * F.silu(gate)))
        return self.head(x).transpose(1, 2)


EXAMPLES["inner-norms"] = Example(
    lambda: exported(InnerNorms(), (torch.zeros(2, 7, 16),), (0,)), vectors(3, 7), vectors(2, 7), BY_CLASS_AXIS
)
EXAMPLES["inner-norms-fused"] = replace(EXAMPLES["inner-norms"], fuse=True)
