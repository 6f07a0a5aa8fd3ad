"""Models for `benchmarks.held_out_layouts`: plain torch modules in the styles in which libraries write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32


class Attention(nn.Module):
    """Causal attention from projections of its own: grouped heads, one projection for all, or interleaved by heads."""

    def __init__(self, heads: int = 8, key_heads: int = 8, style: str = "separate", width: int = WIDTH) -> None:
        super().__init__()
        self.heads, self.key_heads, self.style, self.size = heads, key_heads, style, width // heads
        widths = [width, key_heads * self.size, key_heads * self.size]
        if style == "separate":
            self.q, self.k, self.v = (nn.Linear(width, n, bias=False) for n in widths)
        else:
            self.qkv = nn.Linear(width, sum(widths))
        self.widths = widths
        self.o = nn.Linear(width, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, _ = x.shape
        if self.style == "separate":
            return tuple(f(x).view(batch, tokens, -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        joint = self.qkv(x)
        if self.style == "split":
            parts = joint.split(self.widths, -1)
            return tuple(p.view(batch, tokens, -1, self.size).transpose(1, 2) for p in parts)
        if self.style == "neox":  # [heads, 3 * size]
            parts = joint.view(batch, tokens, self.heads, 3 * self.size).transpose(1, 2).chunk(3, -1)
            return tuple(parts)
        if self.style == "bloom":  # [heads, 3, size]
            joint = joint.view(batch, tokens, self.heads, 3, self.size)
            return tuple(joint[..., i, :].transpose(1, 2) for i in range(3))
        if self.style == "falcon":  # [groups, queries of the group + 2, size]
            each = self.heads // self.key_heads
            joint = joint.view(batch, tokens, self.key_heads, each + 2, self.size)
            q = joint[..., :-2, :].flatten(2, 3)
            k, v = joint[..., [-2], :], joint[..., [-1], :]
            k, v = (y.expand(-1, -1, -1, each, -1).flatten(2, 3) for y in (k, v))
            return tuple(y.transpose(1, 2) for y in (q, k, v))
        joint = joint.view(batch, tokens, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        return tuple(joint)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.project(x)
        if k.shape[1] != q.shape[1]:
            k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, tokens, width))


class Mlp(nn.Module):
    """Two layers; gated by halves, by every second feature, or not."""

    def __init__(self, gate: str = "", hidden: int = 64, width: int = WIDTH) -> None:
        super().__init__()
        self.gate = gate
        self.up = nn.Linear(width, hidden * (2 if gate else 1))
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.gate == "halves":
            gate, y = y.chunk(2, -1)
            return self.down(F.silu(gate) * y)
        if self.gate == "strided":
            return self.down(F.silu(y[..., ::2]) * y[..., 1::2])
        if self.gate == "viewed":
            y = y.view(*y.shape[:-1], -1, 2)
            return self.down(F.silu(y[..., 0]) * y[..., 1])
        return self.down(F.gelu(y))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: Callable[..., nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    def __init__(self, *blocks: nn.Module, words: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Parallel(nn.Module):
    """GPT-J and PaLM: attention with one head of keys and values and a gated MLP from one projection."""

    def __init__(self, heads: int = 8, key_heads: int = 1, hidden: int = 64) -> None:
        super().__init__()
        self.heads, self.size = heads, WIDTH // heads
        self.norm = nn.LayerNorm(WIDTH)
        self.parts = [WIDTH, key_heads * self.size, key_heads * self.size, hidden, hidden]
        self.joint = nn.Linear(WIDTH, sum(self.parts), bias=False)
        self.o, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v, gate, up = self.joint(self.norm(x)).split(self.parts, -1)
        q, k, v = (y.view(batch, tokens, -1, self.size).transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(self.heads // y.shape[1], 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        return x + self.o(y) + self.down(F.silu(gate) * up)


class TwoTowers(nn.Module):
    """CLIP and its kin: pairs of two towers compared by a temperature; each pair's own score is the largest of its row.

    Args:
        style: how rows become vectors: `mean` of tokens, the `first` token, or plain `mlp` towers of vectors.
        bias: SigLIP's bias next to the temperature.
    """

    def __init__(self, style: str = "mean", bias: bool = False, wide: int = 64) -> None:
        super().__init__()
        self.style = style
        self.text = nn.Embedding(96, WIDTH) if style != "mlp" else nn.Linear(16, WIDTH)
        self.image = nn.Linear(16, WIDTH)
        blocks = (lambda: Mlp("", wide)) if style == "mlp" else (lambda: Block(Attention(), Mlp("", wide)))
        self.text_block, self.image_block = blocks(), blocks()
        self.text_out, self.image_out = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.offset = nn.Parameter(torch.tensor(-1.0)) if bias else None

    def vector(self, x: Tensor) -> Tensor:
        if self.style == "mean":
            return x.mean(1)
        return x[:, 0] if self.style == "first" else x

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        text = self.text_out(self.vector(self.text_block(self.text(tokens))))
        image = self.image_out(self.vector(self.image_block(self.image(patches))))
        scores = F.normalize(text, dim=-1) @ F.normalize(image, dim=-1).T * self.temperature.exp()
        return scores if self.offset is None else scores + self.offset


class Mamba2(nn.Module):
    """A selective state space, written as a loop over tokens: one projection for gate, inputs, B, C and steps."""

    def __init__(self, heads: int = 8, state: int = 4, groups: int = 1) -> None:
        super().__init__()
        self.heads, self.state, self.groups, self.inner = heads, state, groups, 2 * WIDTH
        self.parts = [self.inner, self.inner, groups * state, groups * state, heads]
        self.joint = nn.Linear(WIDTH, sum(self.parts), bias=False)
        self.mix = nn.Conv1d(self.inner, self.inner, 4, padding=3, groups=self.inner)
        self.step_bias, self.decay = nn.Parameter(torch.rand(heads)), nn.Parameter(torch.rand(heads))
        self.skip, self.norm = nn.Parameter(torch.rand(heads)), nn.Parameter(torch.rand(self.inner))
        self.out = nn.Linear(self.inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        z, u, b, c, step = self.joint(x).split(self.parts, -1)
        u = F.silu(self.mix(u.transpose(1, 2))[..., :tokens].transpose(1, 2))
        u = u.reshape(batch, tokens, self.heads, -1)
        step = F.softplus(step + self.step_bias)
        kept = torch.exp(-step * self.decay.exp())
        state, found = u.new_zeros(batch, self.heads, u.shape[-1], self.state), []
        for t in range(tokens):
            moved = (step[:, t, :, None] * u[:, t])[..., None] * b[:, t, None, None, :]
            state = state * kept[:, t, :, None, None] + moved
            found.append((state * c[:, t, None, None, :]).sum(-1) + self.skip[:, None] * u[:, t])
        y = torch.stack(found, 1).reshape(batch, tokens, self.inner) * F.silu(z)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norm
        return self.out(y)


class LatentAttention(nn.Module):
    """Attention of DeepSeek-V2: keys and values from a narrow latent, one rotary key for all heads."""

    def __init__(self, heads: int = 8, latent: int = 16, size: int = 4, turned: int = 2) -> None:
        super().__init__()
        self.heads, self.size, self.turned, self.latent = heads, size, turned, latent
        self.q_down, self.q_norm = nn.Linear(WIDTH, latent, bias=False), nn.RMSNorm(latent)
        self.q_up = nn.Linear(latent, heads * (size + turned), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(WIDTH, latent + turned, bias=False), nn.RMSNorm(latent)
        self.kv_up = nn.Linear(latent, heads * 2 * size, bias=False)
        self.o = nn.Linear(heads * size, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(batch, tokens, self.heads, -1).transpose(1, 2)
        narrow, turned = self.kv_down(x).split([self.latent, self.turned], -1)
        kv = self.kv_up(self.kv_norm(narrow)).view(batch, tokens, self.heads, -1).transpose(1, 2)
        k, v = kv.split([self.size, self.size], -1)
        k = torch.cat([k, turned[:, None].expand(-1, self.heads, -1, -1)], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, tokens, -1))


class Experts(nn.Module):
    """A mixture of gated experts, two for each token, all of them computed."""

    def __init__(self, count: int = 4, hidden: int = 32) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(Mlp("halves", hidden) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(2, -1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = torch.where(chosen == number, scores, 0.0).sum(-1, keepdim=True)
            total = total + share * expert(x)
        return total


class ConvNextV2(nn.Module):
    """Depthwise convolutions, norms, MLPs with response normalization."""

    class Block(nn.Module):
        """One of them, over images as they come."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.mix, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.scale, self.shift = nn.Parameter(torch.rand(4 * width)), nn.Parameter(torch.rand(4 * width))

        def forward(self, x: Tensor) -> Tensor:
            y = F.gelu(self.up(self.norm(self.mix(x).permute(0, 2, 3, 1))))
            response = y.pow(2).sum((1, 2), keepdim=True).sqrt()
            y = self.scale * (y * response / (response.mean(-1, keepdim=True) + 1e-6)) + self.shift + y
            return x + self.down(y).permute(0, 3, 1, 2)

    def __init__(self, layers: int = 1, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, 2)
        self.blocks = nn.Sequential(*(self.Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class VisionTransformer(nn.Module):
    """Patches, a class token, attention from one projection."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.first, self.places = nn.Parameter(torch.rand(1, 1, WIDTH)), nn.Parameter(torch.rand(1, 5, WIDTH))
        self.blocks = nn.Sequential(*(Block(Attention(style="permute"), Mlp()) for _ in range(layers)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


class Recurrent(nn.Module):
    """Words through a recurrent layer."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU] = nn.LSTM, both: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.layer = kind(WIDTH, WIDTH, batch_first=True, bidirectional=both)
        self.mlp = Mlp()
        self.head = nn.Linear(WIDTH, 96, bias=False)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH) if both else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.narrow(self.layer(self.embed(tokens))[0])
        return self.head(x + self.mlp(x))
