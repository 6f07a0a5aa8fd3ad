"""Tiny networks in plain torch: convolutional, recurrent, attentive, graph, spectral, mixing, generative."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


IMAGE = _random(2, 3, 16, 16)
SEQUENCE = _random(2, 6, 8, seed=1)
SIGNAL = _random(2, 4, 24, seed=2)
TOKENS = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(3))


class Residual(nn.Module):
    """`x + body(x)`."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class CausalConvolution(nn.Conv1d):
    """Looks only back; the padding is on the left."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, ((self.kernel_size[0] - 1) * self.dilation[0], 0)))


def tcn() -> nn.Module:
    """Temporal convolutions with growing dilation (Bai et al. 2018)."""
    blocks = [
        Residual(CausalConvolution(8, 8, 3, dilation=2**i), nn.ReLU(), CausalConvolution(8, 8, 3, dilation=2**i))
        for i in range(3)
    ]
    return nn.Sequential(nn.Conv1d(4, 8, 1), *blocks, nn.Conv1d(8, 2, 1))


class WaveNet(nn.Module):
    """Gated dilated convolutions with skips (van den Oord et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(4, 6, 1)
        self.gates = nn.ModuleList(CausalConvolution(6, 12, 2, dilation=2**i) for i in range(3))
        self.stays = nn.ModuleList(nn.Conv1d(6, 6, 1) for _ in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(6, 5, 1) for _ in range(3))
        self.leave = nn.Conv1d(5, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        total = torch.zeros_like(x[:, :5])
        for gate, stay, skip in zip(self.gates, self.stays, self.skips, strict=True):
            left, right = gate(x).chunk(2, 1)
            y = torch.tanh(left) * torch.sigmoid(right)
            total = total + skip(y)
            x = x + stay(y)
        return self.leave(F.relu(total))


def separable() -> nn.Module:
    """Depthwise separable convolutions (MobileNet)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()]
    for i, o, stride in ((8, 12, 1), (12, 16, 2)):
        layers += [nn.Conv2d(i, i, 3, stride, 1, groups=i, bias=False), nn.BatchNorm2d(i), nn.Hardswish()]
        layers += [nn.Conv2d(i, o, 1, bias=False), nn.BatchNorm2d(o), nn.Hardswish()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


class SqueezeExcite(nn.Module):
    """Channels weighted by what a small net says of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, 4)
        self.up = nn.Linear(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))
        return x * weights[:, :, None, None]


def grouped() -> nn.Module:
    """Grouped convolutions with channels shuffled between (ResNeXt, ShuffleNet)."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        Residual(
            nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.ChannelShuffle(4), nn.PReLU(8), nn.Conv2d(8, 8, 1, groups=2)
        ),
        SqueezeExcite(8),
        nn.LPPool2d(2, 2),
        nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect"),
    )


class DenseNet(nn.Module):
    """Every layer reads all before it (Huang et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(3 + 4 * i), nn.ReLU(), nn.Conv2d(3 + 4 * i, 4, 3, padding=1)) for i in range(3)
        )
        self.head = nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.head(F.avg_pool2d(x, 2, count_include_pad=False).amax((2, 3)))


class Autoencoder(nn.Module):
    """Convolutions down, transposed convolutions up, a code in between."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 6, 4, 2, 1), nn.ELU(), nn.Conv2d(6, 8, 4, 2, 1), nn.ELU())
        self.squeeze = nn.Linear(8 * 16, 6)
        self.widen = nn.Linear(6, 8 * 16)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 6, 4, 2, 1),
            nn.SELU(),
            nn.ConvTranspose2d(6, 6, 3, 2, 1, output_padding=1, groups=2),
            nn.Tanh(),
            nn.ConvTranspose2d(6, 3, 3, padding=2, dilation=2),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.squeeze(self.encoder(x).flatten(1))
        return self.decoder(self.widen(code).unflatten(1, (8, 4, 4))), code


class VariationalAutoencoder(nn.Module):
    """Mean and spread of a code; in evaluation the mean is decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.Softplus())
        self.mean = nn.Linear(12, 3)
        self.spread = nn.Linear(12, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.Mish(), nn.Linear(12, 8), nn.Sigmoid())

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        mean, spread = self.mean(h), self.spread(h)
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1)
        return self.decoder(mean + noise * torch.exp(0.5 * spread)), divergence


class MixerBlock(nn.Module):
    """Mixes places, then channels (Tolstikhin et al. 2021)."""

    def __init__(self, places: int, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(channels)
        self.places = nn.Sequential(nn.Linear(places, 10), nn.GELU(), nn.Linear(10, places))
        self.norm2 = nn.LayerNorm(channels)
        self.channels = nn.Sequential(nn.Linear(channels, 10), nn.GELU(approximate="tanh"), nn.Linear(10, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(16, 8), MixerBlock(16, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


def super_resolution() -> nn.Module:
    """Sub-pixel convolution (Shi et al. 2016)."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2),
        nn.Tanh(),
        nn.Conv2d(8, 12, 3, padding="same"),
        nn.PixelShuffle(2),
        nn.PixelUnshuffle(2),
        nn.Conv2d(12, 27, 1),
        nn.PixelShuffle(3),
    )


class Sampled(nn.Module):
    """A recurrent net that keeps its last state too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.recurrent = getattr(nn, kind)(8, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, state = self.recurrent(x)
        return self.head(output), state[0] if isinstance(state, tuple) else state


class CellLoop(nn.Module):
    """An LSTM cell and a GRU cell stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.LSTMCell(8, 5)
        self.gated = nn.GRUCell(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 5)
        c = torch.zeros(x.shape[0], 5)
        g = torch.zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h, c = self.long(x[:, t], (h, c))
            g = self.gated(h, g)
        return g


class ScaledAttention(nn.Module):
    """`scaled_dot_product_attention` with a mask of booleans, an added bias and causally."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.zeros(2, 6, 6))
        self.leave = nn.Linear(8, 8)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        masked = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        biased = F.scaled_dot_product_attention(masked, k, v, attn_mask=self.bias, scale=0.3)
        causal = F.scaled_dot_product_attention(q, k, biased, is_causal=True)
        return self.leave(causal.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """`nn.MultiheadAttention` of one sequence to another, with a mask over the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=5)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, ignored: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, keys, values, key_padding_mask=ignored)


def transformer_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)


class Translator(nn.Module):
    """`nn.Transformer` whole, with a causal mask for the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 12, batch_first=True)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), float("-inf")), 1))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.inner(source, target, tgt_mask=self.mask, tgt_is_causal=True)


class RootMeanSquare(nn.Module):
    """A gated feed-forward net with `nn.RMSNorm` and SwiGLU (LLaMA)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.gate = nn.Linear(8, 12, bias=False)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PooledEmbedding(nn.Module):
    """Mean of the embeddings of the tokens that are there, and `nn.EmbeddingBag`."""

    def __init__(self, bag: bool) -> None:
        super().__init__()
        self.embedding: nn.Module = nn.EmbeddingBag(20, 6, mode="mean") if bag else nn.Embedding(20, 6, padding_idx=0)
        self.bag = bag
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.bag:
            return self.head(self.embedding(tokens))
        present = (tokens != 0).unsqueeze(-1).float()
        total = (self.embedding(tokens) * present).sum(1)
        return self.head(total / present.sum(1).clamp(min=1.0))


class Siamese(nn.Module):
    """Two inputs through one branch, compared."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(8, 10), nn.LeakyReLU(0.2), nn.Linear(10, 4))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.branch(left).mean(1), self.branch(right).mean(1)
        return F.cosine_similarity(a, b), F.pairwise_distance(a, b)


class TiedAutoencoder(nn.Module):
    """The decoder's matrix is the encoder's, transposed; an embedding is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.encoder = nn.Linear(6, 4)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, tokens: Tensor) -> Tensor:
        code = torch.tanh(self.encoder(self.embedding(tokens)))
        return (code @ self.encoder.weight + self.bias) @ self.embedding.weight.T


class GraphNet(nn.Module):
    """Messages along edges, summed at their targets by `index_add` and by `scatter_reduce`."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(16, 8)
        self.update = nn.GRUCell(8, 8)
        self.head = nn.Linear(16, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        for _ in range(2):
            messages = torch.tanh(self.message(torch.cat([nodes[source], nodes[target]], -1)))
            nodes = self.update(torch.zeros_like(nodes).index_add(0, target, messages), nodes)
        index = target[:, None].expand(-1, 8)
        most = torch.zeros_like(nodes).scatter_reduce(0, index, nodes[source], "amax", include_self=True)
        return self.head(torch.cat([nodes, most], -1))


class GraphConvolution(nn.Module):
    """`D^-1/2 A D^-1/2 X W` on a dense adjacency (Kipf & Welling 2017), with edge softmax attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6, bias=False)
        self.second = nn.Linear(6, 3)
        self.attend = nn.Parameter(torch.zeros(6, 2))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(-1).clamp(min=1).rsqrt()
        normal = degree[:, :, None] * adjacency * degree[:, None, :]
        h = F.relu(normal @ self.first(x))
        left, right = (h @ self.attend).unbind(-1)
        scores = F.leaky_relu(left[:, :, None] + right[:, None, :], 0.2)
        scores = scores.masked_fill(adjacency == 0, float("-inf"))
        return self.second(torch.softmax(scores, -1).nan_to_num() @ h)
