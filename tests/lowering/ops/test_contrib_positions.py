"""Relative biases, grids and pooling of com.microsoft equal onnxruntime's CPU kernels or their model's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run

RANDOM = np.random.default_rng(0)
MICROSOFT = "com.microsoft"


@pytest.mark.parametrize("bidirectional", [0, 1])
@pytest.mark.parametrize(("lengths", "most"), [((40, 40), 20), ((7, 7), 128), ((5, 40), 32)])
def test_relative_position_bias_is_that_of_t5(lengths: tuple[int, int], most: int, bidirectional: int) -> None:
    """onnxruntime has it for GPUs only; the model that it comes from is the reference."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    table = torch.from_numpy(RANDOM.standard_normal((16, 3)))
    sizes = {name: np.array([size]) for name, size in zip(("query_length", "key_length"), lengths, strict=True)}
    attributes = {"is_bidirectional": bidirectional, "max_distance": most}
    inputs = {"bias_table": table, **dict.fromkeys(sizes)}
    model = make_model("RelativePositionBias", inputs, attributes, 17, domain=MICROSOFT, initializers=sizes)
    distance = torch.arange(lengths[1]) - torch.arange(lengths[0])[:, None]
    buckets = t5.T5Attention._relative_position_bucket(distance, bool(bidirectional), 16, most)
    assert torch.equal(run(model, table), table[buckets].permute(2, 0, 1)[None])
    if lengths == (7, 7):
        check_gradients(model, table)


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize(("padding_mode", "align_corners"), [("zeros", 0), ("border", 1), ("reflection", 0)])
def test_grid_sample(mode: str, padding_mode: str, align_corners: int) -> None:
    X, grid = RANDOM.standard_normal((2, 3, 5, 4)), RANDOM.uniform(-1.2, 1.2, (2, 3, 3, 2))
    attributes = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}
    inputs = {"X": X.astype(np.float32), "Grid": grid.astype(np.float32)}
    model = make_model("GridSample", inputs, attributes, 15, domain=MICROSOFT)
    check_against_onnxruntime(model, *inputs.values(), rtol=1e-4, atol=1e-5)


def test_max_pool_with_the_channels_last() -> None:
    x = RANDOM.integers(0, 256, (2, 7, 6, 3)).astype(np.uint8)
    attributes = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}
    check_against_onnxruntime(make_model("NhwcMaxPool", {"x": x}, attributes, 15, domain=MICROSOFT), x)
