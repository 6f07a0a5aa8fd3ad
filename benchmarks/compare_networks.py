"""Networks written by hand for `benchmarks.compare`, as their users would write them in torch, and the sizes compared.

Each computes its loss from a batch by name; what is exported to ONNX is the same network without the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


@dataclass(frozen=True)
class Size:
    """How large a network and its batches are.

    Attributes:
        layers, width, heads, groups: of a transformer; `groups` are heads of keys and values.
        inner: width between the two linear layers of a block.
        words: of the vocabulary, or classes.
        channels: of an image.
        batch: samples of a step.
        length: tokens of a sample, or rows and columns of an image.
    """

    batch: int
    length: int
    layers: int = 0
    width: int = 0
    heads: int = 0
    groups: int = 0
    inner: int = 0
    words: int = 1000
    channels: int = 3


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, causal: bool) -> Tensor:
    """Attention of [batch, tokens, heads * size] tensors through torch's own kernel."""
    split = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value)]
    return F.scaled_dot_product_attention(*split, is_causal=causal).transpose(1, 2).flatten(2)  # type: ignore[misc]


class GPT2Layer(nn.Module):
    """A pre-norm transformer layer (Radford et al., 2019)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, size.inner), nn.Linear(size.inner, size.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(attend(query, key, value, self.heads, causal=True))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 with its output layer tied to the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.words, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(GPT2Layer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


class RMSNorm(nn.Module):
    """Zhang and Sennrich, 2019, as Llama's own code writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class LlamaLayer(nn.Module):
    """Touvron et al., 2023: rotary embedding, grouped heads, SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.groups = size.heads, size.groups
        narrow = size.width // size.heads * size.groups
        self.norm1, self.norm2 = RMSNorm(size.width), RMSNorm(size.width)
        self.q, self.k = nn.Linear(size.width, size.width, bias=False), nn.Linear(size.width, narrow, bias=False)
        self.v, self.o = nn.Linear(size.width, narrow, bias=False), nn.Linear(size.width, size.width, bias=False)
        self.gate = nn.Linear(size.width, size.inner, bias=False)
        self.up = nn.Linear(size.width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        h = self.norm1(x)
        query = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.k(h).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        value = self.v(h).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        query, key = (t * cosine + turned(t) * sine for t in (query, key))
        key, value = (t.repeat_interleave(self.heads // self.groups, 1) for t in (key, value))
        query, key = query.to(value.dtype), key.to(value.dtype)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def turned(x: Tensor) -> Tensor:
    """(-second half, first half) of the last axis."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Llama(nn.Module):
    """A Llama-style decoder, the output layer its own."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.words, size.width)
        self.layers = nn.ModuleList(LlamaLayer(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.words, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        half = size.width // size.heads // 2
        angles = torch.outer(torch.arange(size.length).float(), 10000 ** (-torch.arange(half).float() / half))
        self.register_buffer("cosine", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sine", torch.cat([angles, angles], -1).sin())

    def forward(self, input_ids: Tensor) -> Tensor:
        x, length = self.tokens(input_ids), input_ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cosine[:length], self.sine[:length])  # type: ignore[index]
        return self.head(self.norm(x))


class BertLayer(nn.Module):
    """A post-norm encoder layer (Devlin et al., 2018)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.q, self.k, self.v, self.o = (nn.Linear(size.width, size.width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(size.width, eps=1e-12), nn.LayerNorm(size.width, eps=1e-12)
        self.up, self.down = nn.Linear(size.width, size.inner), nn.Linear(size.inner, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.o(attend(self.q(x), self.k(x), self.v(x), self.heads, causal=False)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """BERT with its masked language model's head, tied to the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.words, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.norm = nn.LayerNorm(size.width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(size) for _ in range(size.layers))
        self.transform, self.transform_norm = nn.Linear(size.width, size.width), nn.LayerNorm(size.width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(size.words))
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.norm(self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.transform_norm(F.gelu(self.transform(x))), self.tokens.weight, self.bias)


class Bottleneck(nn.Module):
    """A residual block of three convolutions (He et al., 2015; the stride in the middle one)."""

    def __init__(self, entering: int, inner: int, stride: int) -> None:
        super().__init__()
        leaving = 4 * inner
        self.conv1, self.norm1 = nn.Conv2d(entering, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, leaving, 1, bias=False), nn.BatchNorm2d(leaving)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or entering != leaving:
            self.shortcut = nn.Sequential(nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h)))
        return F.relu(self.norm3(self.conv3(h)) + self.shortcut(x))


class ResNet50(nn.Module):
    """He et al., 2015."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        blocks, entering = [], 64
        for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(count):
                blocks.append(Bottleneck(entering, inner, stride if index == 0 else 1))
                entering = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(entering, size.words)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(F.max_pool2d(self.stem(images), 3, 2, 1))
        return self.head(x.mean((2, 3)))


class Fire(nn.Module):
    """Squeeze, then expand by two convolutions side by side (Iandola et al., 2016)."""

    def __init__(self, entering: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(entering, squeezed, 1)
        self.expand1, self.expand3 = nn.Conv2d(squeezed, expanded, 1), nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.expand1(x)), F.relu(self.expand3(x))], 1)


class SqueezeNet(nn.Module):
    """SqueezeNet 1.1, without its dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        first = [nn.Conv2d(3, 64, 3, 2), nn.ReLU(), pool, Fire(64, 16, 64), Fire(128, 16, 64), pool]
        second = [Fire(128, 32, 128), Fire(256, 32, 128), pool, Fire(256, 48, 192), Fire(384, 48, 192)]
        third = [Fire(384, 64, 256), Fire(512, 64, 256), nn.Conv2d(512, size.words, 1), nn.ReLU()]
        self.body = nn.Sequential(*first, *second, *third)

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images).mean((2, 3))


class MnistCnn(nn.Module):
    """Two convolutions and two linear layers, as in PyTorch's example for MNIST, without its dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(size.channels, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(64 * ((size.length - 4) // 2) ** 2, 128)
        self.fc2 = nn.Linear(128, size.words)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(images)))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class InvertedResidual(nn.Module):
    """Expand, convolve each channel alone, project (Sandler et al., 2018)."""

    def __init__(self, entering: int, leaving: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = entering * expansion
        depthwise = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        expand = [nn.Conv2d(entering, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()]
        self.body = nn.Sequential(
            *(expand if expansion > 1 else ()), depthwise, nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, leaving, 1, bias=False), nn.BatchNorm2d(leaving),
        )  # fmt: skip
        self.adds = stride == 1 and entering == leaving

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class MobileNetV2(nn.Module):
    """Sandler et al., 2018, without dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(size.channels, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
        entering = 32
        for expansion, leaving, count, stride in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2),
                                                  (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)):  # fmt: skip
            for index in range(count):
                layers.append(InvertedResidual(entering, leaving, stride if index == 0 else 1, expansion))
                entering = leaving
        layers += [nn.Conv2d(entering, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(1280, size.words)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3)))


NETWORKS: dict[str, Callable[[Size], nn.Module]] = {
    "gpt2": GPT2,
    "llama": Llama,
    "bert": Bert,
    "resnet50": ResNet50,
    "squeezenet": SqueezeNet,
    "mnist": MnistCnn,
    "mobilenet": MobileNetV2,
}
IMAGES = frozenset({"resnet50", "squeezenet", "mnist", "mobilenet"})

SIZES: dict[str, dict[str, Size]] = {
    "gpt2": {
        "tiny": Size(2, 64, layers=2, width=64, heads=2, inner=256, words=512),
        "small": Size(4, 128, layers=4, width=256, heads=4, inner=1024, words=8192),
        "cpu": Size(4, 512, layers=12, width=768, heads=12, inner=3072, words=50257),
        "124M": Size(16, 1024, layers=12, width=768, heads=12, inner=3072, words=50257),
        "355M": Size(8, 1024, layers=24, width=1024, heads=16, inner=4096, words=50257),
        "1.5B": Size(4, 1024, layers=48, width=1600, heads=25, inner=6400, words=50257),
    },
    "llama": {
        "tiny": Size(2, 64, layers=2, width=64, heads=2, groups=1, inner=176, words=512),
        "small": Size(4, 128, layers=4, width=256, heads=4, groups=2, inner=688, words=8192),
        "cpu": Size(4, 512, layers=12, width=768, heads=12, groups=12, inner=2048, words=32000),
        "110M": Size(16, 1024, layers=12, width=768, heads=12, groups=12, inner=2048, words=32000),
        "1B": Size(4, 2048, layers=16, width=2048, heads=32, groups=8, inner=8192, words=32000),
    },
    "bert": {
        "tiny": Size(2, 64, layers=2, width=64, heads=2, inner=256, words=512),
        "small": Size(4, 128, layers=4, width=256, heads=4, inner=1024, words=8192),
        "cpu": Size(4, 512, layers=12, width=768, heads=12, inner=3072, words=30522),
        "base": Size(32, 512, layers=12, width=768, heads=12, inner=3072, words=30522),
        "large": Size(16, 512, layers=24, width=1024, heads=16, inner=4096, words=30522),
    },
    "resnet50": {
        "tiny": Size(2, 64, words=10),
        "small": Size(4, 96, words=100),
        "cpu": Size(16, 224),
        "real": Size(128, 224),
    },
    "squeezenet": {
        "tiny": Size(2, 64, words=10),
        "small": Size(8, 112, words=100),
        "cpu": Size(32, 224),
        "real": Size(256, 224),
    },
    "mnist": {
        "tiny": Size(2, 28, words=10, channels=1),
        "digits": Size(32, 8, words=10, channels=1),
        "small": Size(64, 28, words=10, channels=1),
    },
    "mobilenet": {
        "tiny": Size(2, 64, words=10),
        "small": Size(8, 96, words=100),
        "cpu": Size(32, 224),
        "real": Size(256, 224),
    },
}
"""Of every network; `cpu` is the smallest real one, with batches that a CPU can take."""


def make_network(name: str, size: Size) -> nn.Module:
    """The network with the weights of seed 0, in training mode."""
    torch.manual_seed(0)
    return NETWORKS[name](size).train()


def make_batches(name: str, size: Size, count: int) -> list[dict[str, Tensor]]:
    """Random batches: the network's input under its own name, and `labels`."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        if name in IMAGES:
            images = torch.randn(size.batch, size.channels, size.length, size.length, generator=generator)
            labels = torch.randint(0, size.words, (size.batch,), generator=generator)
            batches.append({"images": images, "labels": labels})
            continue
        tokens = torch.randint(0, size.words, (size.batch, size.length), generator=generator)
        labels = torch.randint(0, size.words, (size.batch, size.length), generator=generator)
        if name == "bert":
            kept = torch.rand(labels.shape, generator=generator) < 0.15
            kept[:, 0] = True
            labels = labels.masked_fill(~kept, IGNORED)
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the labels that count."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)
