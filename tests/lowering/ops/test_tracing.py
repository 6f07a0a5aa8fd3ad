"""Convolutional, normalizing and recurrent operators trace whole: `torch.compile` without a graph break."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onward
from tests.one_node import make_model, normal

RANDOM = np.random.default_rng(0)
_draw = normal(RANDOM)


IMAGE, SMALL = _draw(2, 4, 9, 8), _draw(2, 4, 5, 6)
GATES = {"X": _draw(4, 2, 3), "W": _draw(2, 20, 3), "R": _draw(2, 20, 5), "B": _draw(2, 40)}
CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], int]] = [
    ("Conv", {"X": IMAGE, "W": _draw(4, 1, 3, 3)}, {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2, 2]}, {}, 22),
    ("ConvTranspose", {"X": SMALL, "W": _draw(4, 2, 3, 3)}, {"output_shape": [10, 12], "strides": [2, 2]}, {}, 22),
    ("MaxPool", {"X": IMAGE}, {"kernel_shape": [3, 3], "pads": [0, 2, 1, 1], "strides": [2, 3]}, {}, 22),
    ("AveragePool", {"X": IMAGE}, {"kernel_shape": [3, 2], "dilations": [2, 3], "pads": [1, 0, 0, 1]}, {}, 22),
    ("LpPool", {"X": IMAGE}, {"kernel_shape": [2, 2], "strides": [2, 2]}, {}, 22),
    (
        "Resize",
        {"X": SMALL, "roi": None, "scales": None},
        {"mode": "cubic", "antialias": 1},
        {"scales": [1, 1, 0.6, 1.5]},
        19,
    ),
    ("Resize", {"X": SMALL, "roi": None, "scales": None}, {"nearest_mode": "ceil"}, {"scales": [1, 1, 1.7, 0.6]}, 19),
    ("GridSample", {"X": SMALL, "grid": _draw(2, 3, 3, 2)}, {"padding_mode": "reflection"}, {}, 22),
    ("DeformConv", {"X": SMALL, "W": _draw(3, 4, 2, 2), "offset": _draw(2, 8, 4, 5)}, {}, {}, 22),
    ("GroupNormalization", {"X": SMALL, "scale": _draw(4), "bias": _draw(4)}, {"num_groups": 2}, {}, 21),
    ("LayerNormalization", {"X": SMALL, "Scale": _draw(6), "B": _draw(6)}, {}, {}, 17),
    ("LRN", {"X": SMALL}, {"size": 3}, {}, 13),
    ("LSTM", GATES, {"direction": "bidirectional", "hidden_size": 5}, {}, 22),
    ("LSTM", GATES, {"direction": "bidirectional", "hidden_size": 5, "clip": 2.0}, {}, 22),
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's compiler
@pytest.mark.parametrize(("op_type", "inputs", "attributes", "stored", "opset"), CASES)
def test_traces_without_a_graph_break(
    op_type: str, inputs: dict[str, Any], attributes: dict[str, Any], stored: dict[str, Any], opset: int
) -> None:
    """The same result and gradient as in eager mode."""
    tensors = {name: np.array(value, np.float32) for name, value in stored.items()}
    net = onward.to_torch(make_model(op_type, inputs, attributes, opset, 1, tensors)).train()
    given = [torch.from_numpy(value).requires_grad_() for value in inputs.values() if value is not None]
    torch._dynamo.reset()
    results = []
    for call in (net, torch.compile(net, backend="aot_eager", fullgraph=True)):
        result = call(*given)
        results.append((result.detach(), *torch.autograd.grad(result.square().sum(), given)))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
