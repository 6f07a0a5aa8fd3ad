"""Counting of n-grams of token numbers. Strings have no torch type; their operators are refused."""

from __future__ import annotations

import torch
from torch import Tensor

from onward.lowering.registry import lowers


@lowers("TfIdfVectorizer", since=9)
def tf_idf_vectorizer(
    X: Tensor,
    *,
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    mode: str,
    ngram_counts: tuple[int, ...],
    ngram_indexes: tuple[int, ...],
    pool_int64s: tuple[int, ...] | None = None,
    pool_strings: tuple[str, ...] | None = None,
    weights: tuple[float, ...] | None = None,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__TfIdfVectorizer.html; rows of tokens to rows of n-gram counts."""
    if pool_int64s is None:
        raise ValueError("n-grams of strings cannot be counted; torch has no strings. Give token numbers.")
    if mode not in ("TF", "IDF", "TFIDF"):
        raise ValueError(f"mode {mode!r} is not known; expected TF, IDF or TFIDF.")
    rows = X.reshape(1, -1) if X.dim() < 2 else X
    counts = rows.new_zeros((rows.shape[0], max(ngram_indexes) + 1), dtype=torch.float32)
    ends = (*ngram_counts[1:], len(pool_int64s))
    place = 0
    for length, (start, end) in enumerate(zip(ngram_counts, ends, strict=True), start=1):
        grams = [pool_int64s[i : i + length] for i in range(start, end, length)]
        columns, place = ngram_indexes[place : place + len(grams)], place + len(grams)
        if grams and min_gram_length <= length <= max_gram_length:
            found = _count(rows, torch.tensor(grams, dtype=X.dtype, device=X.device), max_skip_count)
            counts = counts.index_add(1, torch.tensor(columns, device=X.device), found)
    if mode == "IDF":
        counts = counts.clamp(max=1)
    if mode != "TF" and weights is not None:
        scale = counts.new_ones(counts.shape[1])
        scale[list(ngram_indexes)] = counts.new_tensor(weights)
        counts = counts * scale
    return counts[0] if X.dim() < 2 else counts


def _count(rows: Tensor, grams: Tensor, max_skip_count: int) -> Tensor:
    """How often each n-gram (G, n) is in each row (B, T), with up to so many tokens left out between two."""
    length = grams.shape[1]
    found = torch.zeros(rows.shape[0], grams.shape[0], device=rows.device)
    for skip in range(max_skip_count + 1 if length > 1 else 1):
        span = (length - 1) * (skip + 1) + 1
        if span > rows.shape[1]:
            break
        windows = rows.unfold(1, span, 1)[..., :: skip + 1]
        matches = (windows.unsqueeze(2) == grams).all(-1)
        found = found + matches.sum(1)
    return found
