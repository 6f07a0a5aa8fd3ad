"""Tiny networks in plain torch that are neither plain convolutions nor plain attention.

Spectral, einsum, flows, experts, memory, sparse projections, sampling by coordinates, recommendation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.lowering.architectures_plain import Residual


class FourierFeatures(nn.Module):
    """Coordinates as sines and cosines of fixed random frequencies (Tancik et al. 2020), then SIREN layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(8, 5))
        self.first = nn.Linear(10, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * torch.pi * x @ self.frequencies  # type: ignore[operator]
        return self.second(torch.sin(3.0 * self.first(torch.cat([angles.sin(), angles.cos()], -1))))


class SpectralMixing(nn.Module):
    """Tokens mixed by the real part of a Fourier transform, and filtered between two real ones (FNet, GFNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.filter = nn.Parameter(torch.ones(4, 8, 2))
        self.leave = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y + torch.fft.fft(torch.fft.fft(y, dim=-1), dim=-2).real
        spectrum = torch.view_as_real(torch.fft.rfft(y, dim=1, norm="ortho"))
        a, b = spectrum.unbind(-1)
        c, d = self.filter.unbind(-1)
        product = torch.view_as_complex(torch.stack([a * c - b * d, a * d + b * c], -1))
        return self.leave(torch.fft.irfft(product, n=6, dim=1, norm="ortho"))


class Einsum(nn.Module):
    """Attention, a bilinear form and a tensor-train layer in einsum alone."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(2, 8, 4))
        self.key = nn.Parameter(torch.zeros(2, 8, 4))
        self.value = nn.Parameter(torch.zeros(2, 8, 4))
        self.leave = nn.Parameter(torch.zeros(2, 4, 8))
        self.cores = nn.ParameterList([torch.zeros(2, 3, 2), torch.zeros(2, 4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("bnd,hdk->bhnk", x, self.query)
        k = torch.einsum("bnd,hdk->bhnk", x, self.key)
        v = torch.einsum("bnd,hdk->bhnk", x, self.value)
        weights = torch.softmax(torch.einsum("bhnk,bhmk->bhnm", q, k) / 2, -1)
        y = torch.einsum("bhnm,bhmk,hkd->bnd", weights, v, self.leave)
        return torch.einsum("bnij,iar,rjc->bnac", y.unflatten(-1, (2, 4)), *self.cores)


class Volume(nn.Module):
    """Three-dimensional convolutions, pooling and their transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.mid = nn.Conv3d(4, 4, (1, 3, 3), padding=(0, 1, 1), groups=2)
        self.up = nn.ConvTranspose3d(4, 2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool3d(F.relu(self.norm(self.down(x))), 2)
        y = F.interpolate(F.avg_pool3d(self.mid(y), (1, 2, 2)), scale_factor=(1, 2, 2), mode="trilinear")
        return self.up(y)


class GatedConvolution(nn.Module):
    """GLU along channels and features, a highway gate, group and instance normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 12, 3, padding=1)
        self.group = nn.GroupNorm(3, 6)
        self.instance = nn.InstanceNorm1d(6, affine=True)
        self.linear = nn.Linear(24, 16)
        self.gate = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.conv(x), dim=1)
        y = F.glu(self.linear(self.instance(y) + self.group(y.square())), dim=-1)
        t = torch.sigmoid(self.gate(y))
        return t * F.elu(self.other(y), 0.7) + (1 - t) * y


class SpatialTransformer(nn.Module):
    """An image turned by a matrix that the net itself predicts (Jaderberg et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(
            nn.Conv2d(3, 4, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 6)
        )
        self.leave = nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.tanh(self.locate(x)).view(-1, 2, 3)
        line = torch.linspace(-1, 1, 16)
        across, down = torch.meshgrid(line, line, indexing="xy")
        places = torch.stack([across, down, torch.ones_like(across)], -1)
        grid = torch.einsum("hwk,bjk->bhwj", places, turn)
        return self.leave(F.grid_sample(x, grid, align_corners=False, padding_mode="border"))


class CouplingFlow(nn.Module):
    """Affine couplings with a learned permutation by sorting (RealNVP); gives the log-determinant too."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(x.shape[:-1])
        for net in self.nets:
            left, right = x.chunk(2, -1)
            scale, shift = net(left).chunk(2, -1)
            scale = torch.tanh(scale)
            x = torch.cat([right * scale.exp() + shift, left], -1).flip(-1)
            total = total + scale.sum(-1)
        return x, total


class Experts(nn.Module):
    """The two best of four experts for each token, weighted by a softmax over their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.zeros(4, 8, 10))
        self.down = nn.Parameter(torch.zeros(4, 10, 8))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).topk(2, -1)
        weights = torch.zeros_like(self.router(x)).scatter(-1, chosen, torch.softmax(scores, -1))
        hidden = F.gelu(torch.einsum("bnd,edh->bneh", x, self.up))
        return torch.einsum("bneh,ehd,bne->bnd", hidden, self.down, weights)


class Sparsemax(nn.Module):
    """Attention by Euclidean projection on the simplex (Martins & Astudillo 2016): sort, cumulative sum, gather."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 5)
        self.value = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.score(x)
        ordered, _ = torch.sort(z, -1, descending=True)
        count = torch.arange(1, 6, dtype=z.dtype)
        support = 1 + count * ordered > ordered.cumsum(-1)
        size = support.sum(-1, keepdim=True)
        threshold = ((ordered * support).sum(-1, keepdim=True) - 1) / size
        return self.value(torch.clamp(z - threshold, min=0))


class LinearAttention(nn.Module):
    """Causal attention without softmax, by cumulative sums (Katharopoulos et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 12)
        self.leave = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), 1)
        norm = torch.cumsum(k, 1)
        return self.leave(torch.einsum("bnk,bnkv->bnv", q, state) / (q * norm).sum(-1, keepdim=True))


class StateSpace(nn.Module):
    """A diagonal state-space layer as a long convolution (S4D): its kernel is made of the parameters in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.zeros(4, 3))
        self.read = nn.Parameter(torch.zeros(4, 3))
        self.through = nn.Parameter(torch.zeros(4))
        self.mix = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.arange(x.shape[-1], dtype=x.dtype)
        powers = torch.exp(-F.softplus(self.decay)[..., None] * times)
        kernel = torch.einsum("cs,cst->ct", self.read, powers)
        length = x.shape[-1]
        y = F.conv1d(F.pad(x, (length - 1, 0)), kernel.flip(-1)[:, None, :], groups=4)
        return self.mix(F.silu(y + self.through[:, None] * x))


class Recommender(nn.Module):
    """Wide and deep with pairwise interactions of embeddings (DLRM, DeepFM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 4) for n in (20, 20, 20))
        self.wide = nn.Embedding(20, 1)
        self.bottom = nn.Linear(8, 4)
        self.top = nn.Sequential(nn.Linear(10, 6), nn.Hardtanh(), nn.Linear(6, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        vectors = torch.stack([self.bottom(dense), *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        deep = self.top(torch.cat([products[:, rows, columns], self.bottom(dense)], -1))
        return torch.sigmoid(deep + self.wide(sparse).sum(1))


class Parametrized(nn.Module):
    """Weight-normalized and standardized layers, whose matrices are computed from parameters at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized = parametrizations.weight_norm(nn.Linear(8, 6))
        self.conv = nn.Conv1d(6, 4, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.normalized(x).transpose(1, 2)
        variance, mean = torch.var_mean(self.conv.weight, (1, 2), keepdim=True, unbiased=False)
        return F.conv1d(
            y, self.gain * (self.conv.weight - mean) * torch.rsqrt(variance + 1e-5), self.conv.bias, padding=1
        )


class Bilinear(nn.Module):
    """`nn.Bilinear`, a factorization machine, log-sum-exp pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(8, 8, 5)
        self.factors = nn.Parameter(torch.zeros(8, 3))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        pair = self.bilinear(left, right)
        machine = ((left @ self.factors).square() - left.square() @ self.factors.square()).sum(-1, keepdim=True)
        return torch.logsumexp(pair + 0.5 * machine, 1)


class SetTransformer(nn.Module):
    """Learned queries gather a set of any size (Perceiver, attention pooling); deep sets next to."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(3, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.phi = nn.Sequential(nn.Linear(8, 8), nn.CELU(), nn.Linear(8, 8))
        self.rho = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(x.shape[0], -1, -1)
        gathered, _ = self.attention(queries, x, x, need_weights=False)
        return self.rho(gathered.mean(1) + self.phi(x).sum(1))


class LocallyConnected(nn.Module):
    """Its own filter at every place, by unfolding; folded back where patches overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.zeros(49, 27, 6))
        self.back = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 3, stride=2).transpose(1, 2)
        y = torch.einsum("bpi,pio->bpo", patches, self.filters)
        return F.fold(self.back(torch.tanh(y)).transpose(1, 2), (15, 15), 3, stride=2)


class ResidualForecast(nn.Module):
    """Blocks that explain the past and forecast the future (N-BEATS); normalized by the past's own statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 10), nn.ReLU(), nn.Linear(10, 30)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = x.mean(-1, keepdim=True), x.std(-1, keepdim=True) + 1e-5
        past = (x - mean) / spread
        future = torch.zeros_like(past[..., :6])
        for block in self.blocks:
            explained, forecast = block(past).split((24, 6), -1)
            past = past - explained
            future = future + forecast
        return future * spread + mean


class RelativeAttention(nn.Module):
    """Windows of an image attend within themselves with a learned table of relative places, shifted by a roll."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.project = nn.Linear(8, 24)
        self.table = nn.Parameter(torch.zeros(49, 2))
        places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        distance = places[:, :, None] - places[:, None, :] + 3
        self.register_buffer("place_index", distance[0] * 7 + distance[1])
        self.leave = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.roll(self.stem(x).permute(0, 2, 3, 1), (-2, -2), (1, 2))
        windows = x.unflatten(1, (2, 4)).unflatten(3, (2, 4)).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, 8)
        q, k, v = self.project(windows).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) * 0.5 + self.table[self.place_index].permute(2, 0, 1)  # type: ignore[index]
        return self.leave((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class DuelingRainbow(nn.Module):
    """A value and advantages over quantiles (dueling distributional DQN)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 4, 2), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.SiLU(), nn.Flatten())
        self.value = nn.Linear(100, 5)
        self.advantage = nn.Linear(100, 15)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        advantage = self.advantage(h).view(-1, 3, 5)
        return F.log_softmax(self.value(h).unsqueeze(1) + advantage - advantage.mean(1, keepdim=True), -1)


class OrdinaryDifferential(nn.Module):
    """Eight Runge-Kutta steps of a learned field (neural ODE)."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(9, 10), nn.Tanh(), nn.Linear(10, 8))

    def forward(self, x: Tensor) -> Tensor:
        for step in range(4):
            time = torch.full_like(x[..., :1], step / 4)
            first = self.field(torch.cat([x, time], -1))
            x = x + 0.25 * self.field(torch.cat([x + 0.125 * first, time + 0.125], -1))
        return x


def pyramid() -> nn.Module:
    """Pooling to several sizes, resizing bicubically, absolute and rounded activations."""

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = Residual(nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), nn.Hardsigmoid())
            self.arms = nn.ModuleList(nn.Conv2d(3, 2, 1) for _ in range(3))
            self.head = nn.Conv2d(9, 2, 3, padding=1, padding_mode="replicate")

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            parts = [x]
            for arm, size in zip(self.arms, (1, 2, 4), strict=True):
                y = F.softsign(arm(F.adaptive_avg_pool2d(x, size)))
                parts.append(F.interpolate(y, size=(16, 16), mode="bicubic", align_corners=False))
            return F.local_response_norm(self.head(torch.cat(parts, 1)), 2)

    return Pyramid()
