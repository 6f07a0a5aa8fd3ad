"""Normalizations of com.microsoft, against what torch computes of the same sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onward.lowering.ops.contrib_normalization import (
    embed_layer_normalization,
    group_norm,
    simplified_layer_normalization,
    skip_group_norm,
    skip_layer_normalization,
    skip_simplified_layer_normalization,
)

WIDTH = 6
X, SKIP = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
GAMMA, BETA, BIAS = torch.randn(WIDTH), torch.randn(WIDTH), torch.randn(WIDTH)


@pytest.mark.parametrize("bias", [None, BIAS])
def test_sums_are_normalized(bias: torch.Tensor | None) -> None:
    total = X + SKIP + (0 if bias is None else bias)
    expected = F.layer_norm(total, (WIDTH,), GAMMA, BETA, 1e-5)
    found = skip_layer_normalization(X, SKIP, GAMMA, BETA, bias, epsilon=1e-5, output_count=4)
    assert found[1] is found[2] is None  # statistics, which nobody asks for together with the sum
    torch.testing.assert_close((found[0], found[3]), (expected, total))
    result, mean, _ = skip_layer_normalization(X, SKIP, GAMMA, BETA, bias, epsilon=1e-5, output_count=3)
    torch.testing.assert_close((result, mean), (expected, total.mean(-1, keepdim=True)))


@pytest.mark.parametrize("bias", [None, BIAS])
def test_sums_are_divided_by_their_size(bias: torch.Tensor | None) -> None:
    total = X + SKIP + (0 if bias is None else bias)
    expected = F.rms_norm(total, (WIDTH,), GAMMA, 1e-5)
    found = skip_simplified_layer_normalization(X, SKIP, GAMMA, bias, epsilon=1e-5, output_count=4)
    assert found[1] is found[2] is None
    torch.testing.assert_close((found[0], found[3]), (expected, total))
    result, _, inverse = skip_simplified_layer_normalization(X, SKIP, GAMMA, bias, epsilon=1e-5, output_count=3)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(result, total * inverse * GAMMA)
    assert len(skip_simplified_layer_normalization(X, SKIP, GAMMA, bias, output_count=1)) == 1


def test_statistics_of_half_precision_are_wide() -> None:
    (_, inverse) = simplified_layer_normalization(X.bfloat16(), GAMMA.bfloat16(), axis=1, output_count=2)
    assert (inverse.dtype, inverse.shape) == (torch.float32, (2, 1, 1))


@pytest.mark.parametrize("channels_last", [0, 1])
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("is_skip_flat", [False, True])
def test_groups_of_channels(channels_last: int, bias: torch.Tensor | None, is_skip_flat: bool) -> None:
    """`x` and `skip` with channels first are what torch knows; where they are last they are turned."""
    x, skip = torch.randn(2, WIDTH, 4, 5), torch.randn(2, WIDTH, 1, 1)
    total = x + skip + (0 if bias is None else bias.reshape(-1, 1, 1))
    expected = F.silu(F.group_norm(total, 3, GAMMA, BETA, 1e-5))

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim(1, -1) if channels_last else tensor

    how = {"activation": 1, "groups": 3, "channels_last": channels_last}
    given = skip.flatten(1) if is_skip_flat else turned(skip)
    found = skip_group_norm(turned(x), GAMMA, BETA, given, bias, output_count=2, **how)
    torch.testing.assert_close(found, (turned(expected), turned(total)))
    plain = group_norm(turned(x), GAMMA, BETA, activation=0, groups=3, channels_last=channels_last)
    torch.testing.assert_close(plain, turned(F.group_norm(x, 3, GAMMA, BETA, 1e-5)))


@pytest.mark.parametrize("has_all", [False, True])
def test_embeddings_are_added(has_all: bool) -> None:
    words, positions, segments = torch.randn(9, WIDTH), torch.randn(5, WIDTH), torch.randn(2, WIDTH)
    ids, kinds = torch.tensor([[1, 8, 0], [4, 4, 2]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    mask, places = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[4, 3, 2], [0, 0, 1]])
    total = words[ids] + (positions[places] + segments[kinds] if has_all else positions[:3])
    tables = (words, positions, segments if has_all else None, GAMMA, BETA)
    more = (mask, places) if has_all else ()
    found = embed_layer_normalization(ids, kinds if has_all else None, *tables, *more, output_count=3)
    torch.testing.assert_close(found[0], F.layer_norm(total, (WIDTH,), GAMMA, BETA, 1e-12))
    assert found[1].tolist() == ([2, 1] if has_all else [0, 0])
    torch.testing.assert_close(found[2], total)
