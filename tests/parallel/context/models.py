"""Models whose sequences are made, mixed or shifted in ways of their own, for tests of context parallelism."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onward.graph.losses.spec import LossSpec
from tests.parallel.horizontal_models import BY_CLASS_AXIS, CROSS_ENTROPY, Example, exported

WIDTH, HEADS, CLASSES = 16, 2, 10


class Layer(nn.Module):
    """Attention of given keys under a mask, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(
        self, x: Tensor, keys: Tensor | None = None, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        y = self.norm(x)
        k, v = self.kv(y if keys is None else keys).chunk(2, -1)
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q(y), k, v))
        found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm_2(x))))


class Shifted(nn.Module):
    """A causal network that gives no logits for the last token, with ALiBi over a window."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        ago = place[:, None] - place
        slopes = torch.tensor([0.5, 0.25])[:, None, None]
        mask = torch.where((ago < 0) | (ago > 3), -torch.inf, -slopes * ago)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)[:, :-1].transpose(1, 2)


class Mixed(nn.Module):
    """Causal attention with a convolution over time, a recurrent layer and a running sum between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(WIDTH, CLASSES)
        self.conv, self.lstm = nn.Conv1d(WIDTH, WIDTH, 3, groups=4), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x, causal=True)
        x = x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        x = self.layers[1](x, causal=True)
        x = x + self.lstm(x)[0]
        x = self.layers[2](x, causal=True) + 0.1 * x.cumsum(1)
        return self.head(self.layers[3](x, causal=True)).transpose(1, 2)


class Recurrent(nn.Module):
    """One attention between recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Layer(), nn.Linear(64, CLASSES)
        self.lstm = nn.LSTM(WIDTH, 64, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.layer(x))[0]).transpose(1, 2)


class Patches(nn.Module):
    """A vision transformer: patches by a convolution, a class token and learned positions."""

    def __init__(self, pools: bool) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 2, 2)
        self.first, self.positions = nn.Parameter(torch.rand(1, 1, WIDTH)), nn.Parameter(torch.rand(1, 17, WIDTH))
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(WIDTH, CLASSES)
        self.pools = pools

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1) if self.pools else x[:, 0])


class Translation(nn.Module):
    """Encoder and decoder, of sequences of different lengths, with relative positions as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.ModuleList(Layer() for _ in range(2)) for _ in range(2))
        self.across, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, CLASSES)
        self.words, self.distances = nn.Embedding(CLASSES, WIDTH), nn.Embedding(15, HEADS)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        bias = self.distances((place[:, None] - place).clamp(-7, 7) + 7).permute(2, 0, 1)
        for layer in self.encoder:
            x = layer(x, mask=bias)
        y = self.words(words)
        for own, across in zip(self.decoder, self.across, strict=True):
            y = across(own(y, causal=True), keys=x)
        return self.head(y).transpose(1, 2)


class Experts(nn.Module):
    """Attention, and a mixture of experts of which each token chooses two."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router, self.head = Layer(), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, CLASSES)
        self.up, self.down = (nn.Parameter(torch.rand(4, *shape) / 4) for shape in ((WIDTH, 12), (12, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x, causal=True)
        shares, chosen = self.router(x).softmax(-1).topk(2)
        gates = torch.zeros(*x.shape[:2], 4).scatter(-1, chosen, shares)
        inner = torch.relu(torch.einsum("bnd,edf->bnef", x, self.up))
        return self.head(x + torch.einsum("bnef,efd,bne->bnd", inner, self.down, gates)).transpose(1, 2)


class Unordered(nn.Module):
    """Linear attention: sums over the tokens of products of keys and values; then keys and values of softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = Layer(), Layer(), nn.Linear(WIDTH, CLASSES)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.elu(one) + 1 for one in self.qkv(self.first(x)).chunk(3, -1))
        summed = torch.einsum("btc,btd->bcd", k, v)
        x = x + (q @ summed) / (q @ k.sum(1).unsqueeze(-1)) + x.amax(1, keepdim=True)
        return self.head(self.last(x)).transpose(1, 2)


class Merged(nn.Module):
    """Tokens of all samples are rows of one matrix: by samples in the first layer, by time in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.out = (nn.ModuleList(nn.Linear(WIDTH, n) for _ in range(2)) for n in (3 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        for joint, out, is_time_first in zip(self.joint, self.out, (False, True), strict=True):
            order, back = ((1, 2, 0, 3), (2, 0, 1, 3)) if is_time_first else ((0, 2, 1, 3), (0, 2, 1, 3))
            rows = (x.transpose(0, 1) if is_time_first else x).reshape(-1, WIDTH)
            sizes = (tokens, batch) if is_time_first else (batch, tokens)
            q, k, v = (one.reshape(*sizes, HEADS, -1).permute(order) for one in joint(rows).chunk(3, -1))
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(back)
            rows = rows + out(found.reshape(batch * tokens, WIDTH))
            x = rows.view(*sizes, WIDTH)
            x = x.transpose(0, 1) if is_time_first else x
        return self.head(x).transpose(1, 2)


class KeysFirst(nn.Module):
    """Attention whose scores have the keys in rows, with a softmax over them."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.joint(x.tanh()).chunk(3, -1))
        scores = (k @ q.transpose(-1, -2) / 2).softmax(-2)
        found = (v.transpose(-1, -2) @ scores).permute(0, 3, 1, 2)
        return self.head(x + found.flatten(2)).transpose(1, 2)


class Neighbours(nn.Module):
    """Attention next to convolutions along the tokens: causal, centered and dilated, depthwise and gated, over images.

    Written as padding before them, as their own, and as more of it whose last results are cut off.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, CLASSES)
        self.first, self.wide = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.causal = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.short = nn.Conv1d(WIDTH, WIDTH, 2, padding=2, dilation=2, groups=4)
        self.plane = nn.Conv2d(1, 2, 3, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x, causal=True)
        y = self.first(x.transpose(1, 2)).relu()
        y = self.causal(F.pad(F.glu(self.wide(y), 1), (2, 0)))
        y = y + F.silu(self.short(y)[..., : x.shape[1]])
        x = x + y.transpose(1, 2)
        x = x + self.plane(x.unsqueeze(1)).sum(1)
        return self.head(self.layers[1](x, causal=True)).transpose(1, 2)


def drawn(labels: tuple[int, ...], **shapes: tuple[int, ...]) -> Callable[[], dict[str, Tensor]]:
    """Real features of these shapes, `words` of classes, and labels."""

    def draw() -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(1)
        found = {name: torch.randn(shape, generator=g) for name, shape in shapes.items() if name != "words"}
        if "words" in shapes:
            found["words"] = torch.randint(0, CLASSES, shapes["words"], generator=g)
        return {**found, "labels": torch.randint(0, CLASSES, labels, generator=g)}

    return draw


def example(
    module: Callable[[], nn.Module],
    loss: LossSpec,
    labels: tuple[int, ...],
    fuse: bool = True,
    open_axes: tuple[int, ...] = (0, 1),
    **shapes: tuple[int, ...],
) -> Example:
    """Of three samples."""
    features = drawn(labels, **shapes)

    def make() -> ir.Model:
        given = tuple(features()[name][:2] for name in shapes)
        return exported(module(), given, open_axes)

    return Example(make, features, features, loss, fuse)


CONTEXT_EXAMPLES: dict[str, Example] = {
    "shifted-labels": example(Shifted, BY_CLASS_AXIS, (3, 7), x=(3, 8, WIDTH)),
    "shifted-labels-unfused": example(Shifted, BY_CLASS_AXIS, (3, 7), fuse=False, x=(3, 8, WIDTH)),
    "mixed": example(Mixed, BY_CLASS_AXIS, (3, 8), open_axes=(0,), x=(3, 8, WIDTH)),
    "neighbours": example(Neighbours, BY_CLASS_AXIS, (3, 15), open_axes=(0,), x=(3, 15, WIDTH)),
    "recurrent": example(Recurrent, BY_CLASS_AXIS, (3, 8), open_axes=(0,), x=(3, 8, WIDTH)),
    "patches": example(lambda: Patches(False), CROSS_ENTROPY, (3,), open_axes=(0,), x=(3, 3, 8, 8)),
    "patches-mean": example(lambda: Patches(True), CROSS_ENTROPY, (3,), open_axes=(0,), x=(3, 3, 8, 8)),
    "translation": example(Translation, BY_CLASS_AXIS, (3, 8), x=(3, 12, WIDTH), words=(3, 8)),
    "experts": example(Experts, BY_CLASS_AXIS, (3, 8), x=(3, 8, WIDTH)),
    "experts-unfused": example(Experts, BY_CLASS_AXIS, (3, 8), fuse=False, x=(3, 8, WIDTH)),
    "merged-samples": example(Merged, BY_CLASS_AXIS, (3, 7), x=(3, 7, WIDTH)),
    "keys-first": example(KeysFirst, BY_CLASS_AXIS, (3, 7), x=(3, 7, WIDTH)),
    "unordered": example(Unordered, BY_CLASS_AXIS, (3, 8), x=(3, 8, WIDTH)),
}
