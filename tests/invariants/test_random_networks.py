"""Networks drawn at random train alike with and without what makes training faster or smaller.

`python -m benchmarks.fuzz_speedups` draws thousands of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.fuzz_speedups import try_one

from onward.lowering.kernels import bounds, thin_products
from onward.lowering.ops import fused


@pytest.mark.parametrize("seed", [7, 31, 51, 64, 105, 135])
def test_networks_of_images(seed: int) -> None:
    """Of batches of 1, 3 and 4; three of them showed what went wrong with one image."""
    assert try_one(seed) == []


@pytest.mark.parametrize("seed", [5, 8, 10, 16, 34, 40, 50])
def test_networks_of_sequences(seed: int) -> None:
    """Norms, gates, bounds, attention, outer products and tied tables between them, in opsets 11 to 22."""
    assert try_one(seed, "sequences") == []


def test_a_backward_pass_that_is_off_by_a_thousandth_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for function, seed in ((fused._RMSNorm, 5), (fused._SwiGLU, 8), (bounds._Clamp, 34), (thin_products._Thin, 10)):
        backward = function.backward

        def wrong(ctx: Any, *gradients: Any, backward: Any = backward) -> tuple[Any, ...]:
            return tuple(1.001 * one if isinstance(one, torch.Tensor) else one for one in backward(ctx, *gradients))

        with monkeypatch.context() as patch:
            patch.setattr(function, "backward", staticmethod(wrong))
            assert try_one(seed, "sequences") != [], function
