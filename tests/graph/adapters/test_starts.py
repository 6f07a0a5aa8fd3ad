"""What adapters begin as."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onward.graph.adapters.starts import largest_singular_vectors
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.parameters import Adapter
from tests.graph.adapters.readings import READINGS


def test_adapters_begin_alike_for_one_seed_and_apart_for_another():
    model = READINGS["MatMul"].model()
    starts = [
        OnnxModule(make_training_graph(model, adapter=Adapter(rank=2, targets=("w",)), seed=seed)).weights["w.lora_A"]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert starts[0].abs().max() <= 5**-0.5


@pytest.mark.parametrize("stack", [(), (2,)])
def test_approximate_singular_vectors_are_those_of_an_exact_decomposition(stack: tuple[int, ...]):
    """Of a spectrum without gaps, as trained weights have it: the product is as close as torch's own approximation."""
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.standard_normal((*stack, n, 60))).Q for n in (90, 60))
    matrix = (left * 0.9 ** np.arange(60)) @ np.swapaxes(right, -1, -2)
    u, s, v = largest_singular_vectors(matrix.astype(np.float32), 4, 4, random)
    assert s.shape == (*stack, 12)
    np.testing.assert_allclose(s[..., :4], np.broadcast_to(0.9 ** np.arange(4), (*stack, 4)), rtol=1e-3)
    exact = (left[..., :4] * 0.9 ** np.arange(4)) @ np.swapaxes(right, -1, -2)[..., :4, :]
    found = (u[..., :4] * s[..., None, :4]) @ v[..., :4, :]
    theirs = torch.svd_lowrank(torch.from_numpy(matrix), 4, niter=4)
    of_theirs = (theirs[0] * theirs[1].unsqueeze(-2)) @ theirs[2].mT
    assert np.abs(found - exact).max() <= np.abs(of_theirs.numpy() - exact).max()


def test_what_an_approximate_start_takes_out_of_the_weight_is_the_adapter():
    case = READINGS["stack of experts"]
    inputs = {name: torch.from_numpy(array) for name, array in case.inputs.items()}
    plain = OnnxModule(make_training_graph(case.model()))(**inputs)
    settings = Adapter(rank=2, targets=("w",), start="pissa", pissa_iterations=2)
    net = OnnxModule(make_training_graph(case.model(), adapter=settings))
    assert net.weights["w.lora_B"].abs().max() > 0.1
    torch.testing.assert_close(net(**inputs), plain, atol=1e-5, rtol=1e-5)
