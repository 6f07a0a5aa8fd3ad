"""Mixtures of experts as people write them in torch, each a small module of the same routing."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph.exported import export

EXPERTS, CHOICES, WIDTH, HIDDEN = 4, 2, 8, 12


class Mixture(nn.Module):
    """A router that chooses the best experts of every token; their shares add up to one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, chosen = torch.softmax(self.gate(x), -1).topk(CHOICES, -1)
        return shares / shares.sum(-1, keepdim=True), chosen

    def gates(self, x: Tensor) -> Tensor:
        shares, chosen = self.route(x)
        return torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype).scatter(-1, chosen, shares)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RowsOfExperts(Mixture):
    """Mixtral's loop: the rows of each expert are gathered, and its results added to the tokens'."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Gated() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        shares, chosen = self.route(tokens)
        result = torch.zeros_like(tokens)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            place, row = torch.where(mask[number])
            result.index_add_(0, row, expert(tokens[row]) * shares[row, place, None])
        return result.view(x.shape)


class Loop(Mixture):
    """Every expert for all tokens, times its gate."""

    def __init__(self) -> None:
        super().__init__()
        layers = lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))  # noqa: E731
        self.experts = nn.ModuleList(layers() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.route(x)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            result = result + (shares * (chosen == number)).sum(-1, keepdim=True) * expert(x)
        return result


class Stacked(Loop):
    """The results of all experts side by side, weighed by gates of which most are zero."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.stack([expert(x) for expert in self.experts], -2) * self.gates(x).unsqueeze(-1)).sum(-2)


class Einsum(Mixture):
    """Stacks of weights, all experts in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(torch.einsum("bnd,edf->bnef", x, self.up))
        return torch.einsum("bnef,efd,bne->bnd", hidden, self.down, self.gates(x))


class Batched(Einsum):
    """Stacks of weights, the experts in front."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        rows = tokens.unsqueeze(0).expand(EXPERTS, -1, -1)
        results = torch.bmm(F.silu(torch.bmm(rows, self.up)), self.down)
        return (results * self.gates(tokens).t().unsqueeze(-1)).sum(0).view(x.shape)


class Slices(Einsum):
    """A loop over slices of stacks."""

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.route(x)
        result = torch.zeros_like(x)
        for number in range(EXPERTS):
            gate = torch.where(chosen == number, shares, 0.0).sum(-1, keepdim=True)
            result = result + gate * (F.relu(x @ self.up[number]) @ self.down[number])
        return result


class Selected(Mixture):
    """The weights of every token's experts, gathered: `batched_mm` of transformers; gate and value in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        shares, chosen = self.route(tokens)
        rows, numbers = tokens.repeat_interleave(CHOICES, 0), chosen.reshape(-1)
        gate, value = torch.bmm(self.up[numbers], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        results = torch.bmm(self.down[numbers], (F.silu(gate) * value).unsqueeze(-1)).squeeze(-1)
        return (results * shares.reshape(-1, 1)).view(-1, CHOICES, WIDTH).sum(1).view(x.shape)


class ScaledInputs(Mixture):
    """Llama 4: sigmoids of the best scores scale what experts read, all experts at once, next to a shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.shared = Gated()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        scores = self.gate(tokens)
        best, chosen = scores.topk(CHOICES, -1)
        scores = torch.full_like(scores, -torch.inf).scatter(1, chosen, best).sigmoid()
        rows = tokens.repeat(EXPERTS, 1) * scores.t().reshape(-1, 1)
        gate, value = torch.bmm(rows.view(EXPERTS, -1, WIDTH), self.up).chunk(2, -1)
        routed = torch.bmm(value * F.silu(gate), self.down).view(-1, WIDTH)
        return (self.shared(tokens) + routed.reshape(EXPERTS, -1, WIDTH).sum(0)).view(x.shape)


class Bounded(Mixture):
    """GPT-OSS: gates and values alternate and are clipped; biases; shares are a softmax of the best scores."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * HIDDEN))
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        best, chosen = self.gate(tokens).topk(CHOICES, -1)
        numbers = chosen.reshape(-1)
        rows = tokens.repeat_interleave(CHOICES, 0).unsqueeze(1)
        hidden = torch.bmm(rows, self.up[numbers]).squeeze(1) + self.up_bias[numbers]
        gate, value = hidden[..., ::2].clamp(max=1.5), hidden[..., 1::2].clamp(-1.5, 1.5)
        hidden = (value + 1) * (gate * torch.sigmoid(1.702 * gate))
        results = torch.bmm(hidden.unsqueeze(1), self.down[numbers]).squeeze(1) + self.down_bias[numbers]
        return (results * best.softmax(-1).reshape(-1, 1)).view(-1, CHOICES, WIDTH).sum(1).view(x.shape)


class Grouped(RowsOfExperts):
    """DeepSeek-V3: sigmoids and a correction choose groups of experts, then experts in them; a shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Gated()
        self.register_buffer("correction", torch.tensor([0.1, -0.2, 0.3, 0.05]))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).sigmoid()
        corrected = scores + self.correction
        groups = corrected.view(-1, 2, EXPERTS // 2)
        best = groups.topk(2, -1)[0].sum(-1).topk(1, -1, sorted=False)[1]
        mask = torch.zeros_like(groups[..., 0]).scatter(1, best, 1).unsqueeze(-1).expand(groups.shape)
        allowed = corrected.masked_fill(~mask.reshape(corrected.shape).bool(), -torch.inf)
        chosen = allowed.topk(CHOICES, -1, sorted=False)[1]
        shares = scores.gather(1, chosen)
        return shares / (shares.sum(-1, keepdim=True) + 1e-20) * 2.5, chosen

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared(x)


class Dispatched(Mixture):
    """Switch Transformer: the best expert of each token, which takes no more than a few tokens of a sequence."""

    capacity = 3

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(self.gate(x), -1)
        share, chosen = probabilities.max(-1)
        mask = F.one_hot(chosen, EXPERTS).to(x.dtype)
        place = torch.cumsum(mask, -2) * mask
        mask = mask * (place <= self.capacity)
        slot = F.one_hot((place - 1).amax(-1).clamp(min=0).long(), self.capacity + 3).to(x.dtype)[..., : self.capacity]
        combine = (share.unsqueeze(-1) * mask).unsqueeze(-1) * slot.unsqueeze(-2)  # [batch, tokens, experts, slots]
        dispatch = (combine > 0).to(x.dtype)
        rows = torch.einsum("bnec,bnd->ebcd", dispatch, x)
        hidden = F.relu(torch.einsum("ebcd,edf->ebcf", rows, self.up) + self.up_bias[:, None, None])
        results = torch.einsum("ebcf,efd->ebcd", hidden, self.down) + self.down_bias[:, None, None]
        return torch.einsum("ebcd,bnec->bnd", results, combine)


class TwoDispatched(Mixture):
    """GShard and NLLB-MoE: the second choices of a sequence come after all first ones; a list of gated experts."""

    capacity = 4

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Gated() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(self.gate(x), -1)
        first = F.one_hot(probabilities.argmax(-1), EXPERTS)
        second = F.one_hot(probabilities.masked_fill(first.bool(), -torch.inf).argmax(-1), EXPERTS)
        places = torch.cumsum(first, 1) - 1, torch.cumsum(second, 1) - 1 + first.sum(1, keepdim=True)
        total = (probabilities * (first + second)).sum(-1, keepdim=True)
        combine = torch.zeros(*x.shape[:-1], EXPERTS, self.capacity, dtype=x.dtype)
        for mask, place in zip((first, second), places, strict=True):
            mask = mask * (place < self.capacity)
            slots = F.one_hot((place * mask).sum(-1), self.capacity).to(x.dtype)
            gates = (probabilities * mask).sum(-1, keepdim=True) / total * mask
            combine = combine + torch.einsum("bne,bnc->bnec", gates, slots)
        rows = torch.einsum("bnec,bnd->becd", combine.bool().to(x.dtype), x)
        results = [expert(own.squeeze(1)) for expert, own in zip(self.experts, rows.chunk(EXPERTS, 1), strict=True)]
        return torch.einsum("bnec,becd->bnd", combine, torch.stack(results, 1))


class Soft(Einsum):
    """Soft mixture: each slot is a weighted mean of all tokens, each token one of all slots; two slots an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * EXPERTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        rows = (scores.softmax(1).transpose(1, 2) @ x).view(-1, EXPERTS, 2, WIDTH)
        results = F.gelu(rows @ self.up) @ self.down
        return scores.softmax(2) @ results.reshape(-1, 2 * EXPERTS, WIDTH)


class Choosing(Einsum):
    """Expert choice: the experts choose the tokens of a sequence that score best with them."""

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = torch.softmax(self.gate(x), -1).transpose(1, 2).topk(3, -1)  # [batch, experts, 3]
        places = chosen.flatten(1).unsqueeze(-1).expand(-1, -1, WIDTH)
        rows = x.gather(1, places).view(-1, EXPERTS, 3, WIDTH)
        results = torch.einsum("becf,efd->becd", F.silu(torch.einsum("becd,edf->becf", rows, self.up)), self.down)
        weighted = (results * shares.unsqueeze(-1)).flatten(1, 2)
        return torch.zeros_like(x).scatter_add(1, places, weighted)


MIXTURES = (
    RowsOfExperts, Loop, Stacked, Einsum, Batched, Slices, Selected, ScaledInputs, Bounded, Grouped,
)  # fmt: skip
SLOTS = Dispatched, TwoDispatched, Soft, Choosing
"""The model puts tokens into slots of experts itself."""


class Network(nn.Module):
    """A first layer, a residual layer around a mixture, and a last layer."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixture = mixture
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(x + self.mixture(x))


def exported(kind: type[Mixture], path: Path, dtype: torch.dtype = torch.float64) -> Path:
    """A network of one mixture, any number of samples of 6 tokens."""
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=2, max=64)
    inputs = (torch.randn(2, 6, WIDTH, dtype=dtype),)
    return export(
        Network(kind()).to(dtype), inputs, path, 20, True,
        input_names=["x"], output_names=["y"], dynamic_shapes=({0: batch},),
    )  # fmt: skip
