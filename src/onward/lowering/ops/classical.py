"""Classical machine learning, the domain ai.onnx.ml, and what its nodes are rewritten to, `onward.classical`."""

from __future__ import annotations

import torch
from torch import Tensor

from onward.errors import NodeError
from onward.graph.classical.rewriting import DOMAIN
from onward.graph.nodes.structure import ML_DOMAIN
from onward.lowering.registry import lowers

_COUPLING_ROUNDS = 100
_COUPLING_TOLERANCE = 0.005
"""onnxruntime's own, divided by the number of classes."""

_SMALLEST_PROBABILITY = 1e-7


@lowers("ArrayFeatureExtractor", domain=ML_DOMAIN)
def array_feature_extractor(X: Tensor, Y: Tensor) -> Tensor:
    """Elements of the last axis by their places; of a vector as one row."""
    picked = X.index_select(-1, Y.reshape(-1))
    return picked.unsqueeze(0) if X.dim() == 1 else picked


@lowers("FeatureVectorizer", domain=ML_DOMAIN)
def feature_vectorizer(*X: Tensor, inputdimensions: tuple[int, ...] | None = None) -> Tensor:
    """All features of a row side by side, as float32; `inputdimensions` says how many of each input count."""
    rows = [part.reshape(1, -1) if part.dim() == 1 else part.reshape(part.shape[0], -1) for part in X]
    sizes = inputdimensions or tuple(part.shape[1] for part in rows)
    kept = [
        torch.nn.functional.pad(part[:, :size].float(), (0, max(0, size - part.shape[1])))
        for part, size in zip(rows, sizes, strict=True)
    ]
    return torch.cat(kept, dim=1)


@lowers("Normalizer", domain=ML_DOMAIN)
def normalizer(X: Tensor, *, norm: str = "MAX") -> Tensor:
    """Rows divided by their norm, as float32; a row whose norm is 0 stays. MAX is the maximum, with its sign."""
    rows = X.float()
    if norm == "MAX":
        size = rows.amax(dim=-1, keepdim=True)
    elif norm == "L1":
        size = rows.abs().sum(dim=-1, keepdim=True)
    elif norm == "L2":
        squares = rows.square().sum(dim=-1, keepdim=True)
        size = torch.where(squares == 0, squares, torch.where(squares == 0, 1, squares).sqrt())
    else:
        raise ValueError(f"norm is {norm!r}; expected MAX, L1 or L2")
    return rows / torch.where(size == 0, 1, size)


@lowers("Lookup", domain=DOMAIN)
def lookup(x: Tensor, keys: Tensor, values: Tensor, default: Tensor) -> Tensor:
    """The value of each key, keys in ascending order; `default` for others. A NaN finds the key NaN, the last."""
    flat = x.reshape(-1)
    if keys.numel() == 0:
        return default.expand(x.shape)
    place = torch.searchsorted(keys, flat.to(keys.dtype)).clamp(max=keys.numel() - 1)
    found = keys[place] == flat
    if keys.is_floating_point():
        last = keys[-1:].isnan() & flat.isnan()
        place = torch.where(last, keys.numel() - 1, place)
        found = found | last
    return torch.where(found, values[place], default).reshape(x.shape)


@lowers("OneHotCategories", domain=DOMAIN)
def one_hot_categories(x: Tensor, categories: Tensor, *, zeros: int = 1) -> Tensor:
    """1 at the place of the category, 0 elsewhere; with `zeros` = 0 an unknown category is an error."""
    matches = x.unsqueeze(-1) == categories
    if not zeros and not bool(matches.any(dim=-1).all()):
        wrong = x[~matches.any(dim=-1)].reshape(-1)[0].item()
        raise NodeError(
            f"a OneHotEncoder with zeros = 0 got the category {wrong}, which is none of its {categories.numel()}. Fix "
            "the data, or export the model with zeros = 1."
        )
    return matches.float()


@lowers("SoftmaxZero", domain=DOMAIN)
def softmax_zero(x: Tensor) -> Tensor:
    """A softmax over each row in which zeros, up to 1e-7, take no part."""
    highest = x.amax(dim=-1, keepdim=True).detach()
    takes_part = x.abs() > 1e-7
    powers = torch.where(takes_part, (x - highest).exp(), x * (-highest).exp())
    return powers / torch.where(takes_part, powers, 0).sum(dim=-1, keepdim=True)


@lowers("Probit", domain=DOMAIN)
def probit(x: Tensor) -> Tensor:
    """The quantile of the normal distribution by Winitzki's formula, with the constants that onnxruntime has for it."""
    centered = 2 * x - 1
    logarithm = ((1 - centered) * (1 + centered)).log()
    first = 2 / (3.14159 * 0.147) + 0.5 * logarithm
    inverse = ((first.square() - logarithm / 0.147).sqrt() - first).sqrt()
    return 1.41421356 * torch.where(centered < 0, -inverse, inverse)


@lowers("RadialBasis", domain=DOMAIN)
def radial_basis(x: Tensor, vectors: Tensor, gamma: Tensor) -> Tensor:
    """`exp(-gamma |x - v|^2)` of every row and every vector, [rows, vectors]."""
    return (-gamma * (x.unsqueeze(1) - vectors).square().sum(dim=-1)).exp()


@lowers("PairwiseCoupling", domain=DOMAIN)
def pairwise_coupling(pairs: Tensor, *, classes: int) -> Tensor:
    """Probabilities of classes from those of the lower class of every pair (Wu, Lin and Weng, 2004, second method).

    The fixed point is approached as onnxruntime does, to the same tolerance.
    """
    low, high = torch.triu_indices(classes, classes, offset=1, device=pairs.device)
    wins = pairs.clamp(_SMALLEST_PROBABILITY, 1 - _SMALLEST_PROBABILITY)
    beaten = torch.zeros(pairs.shape[0], classes, classes, dtype=pairs.dtype, device=pairs.device)
    beaten = beaten.index_put((torch.arange(len(pairs), device=pairs.device)[:, None], high, low), 1 - wins)
    beaten = beaten.index_put((torch.arange(len(pairs), device=pairs.device)[:, None], low, high), wins)
    # beaten[n, i, j]: how probable class i is among i and j
    matrix = -(beaten * beaten.transpose(1, 2)) + torch.diag_embed(beaten.square().sum(dim=1))
    chances = torch.full_like(beaten[:, :, 0], 1 / classes)
    active = torch.ones(len(pairs), 1, dtype=torch.bool, device=pairs.device)
    for _ in range(_COUPLING_ROUNDS):
        product = (matrix @ chances.unsqueeze(-1)).squeeze(-1)
        total = (chances * product).sum(dim=1, keepdim=True)
        error = (product - total).abs().amax(dim=1, keepdim=True)
        active = active & (error >= _COUPLING_TOLERANCE / classes)
        if not bool(active.any()):
            break
        chances = torch.where(active, _one_round(matrix, chances, product, total), chances)
    return chances


def _one_round(matrix: Tensor, chances: Tensor, product: Tensor, total: Tensor) -> Tensor:
    """Every class moved in turn to where its own condition holds, the others scaled so that the sum stays 1."""
    for index in range(chances.shape[1]):
        own, row = matrix[:, index, index].unsqueeze(1), matrix[:, index]
        step = (total - product[:, index : index + 1]) / own
        mine = torch.eye(chances.shape[1], dtype=chances.dtype, device=chances.device)[index]
        total = (total + step * (step * own + 2 * product[:, index : index + 1])) / (1 + step).square()
        chances = (chances + step * mine) / (1 + step)
        product = (product + step * row) / (1 + step)
    return chances
