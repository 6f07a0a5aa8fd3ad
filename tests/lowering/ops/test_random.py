"""Random operators draw what the standard says, from torch's generator; dropout follows the mode of the network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward.errors import NodeError
from tests.one_node import make_model, run

DATA = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def _dropout(opset: int, ratio: float = 0.25, outputs: int = 2, **more: Any) -> Any:
    """A dropout whose ratio (and mode) are tensors of the model, or attributes before version 12."""
    if opset < 12:
        return make_model("Dropout", {"data": DATA}, {"ratio": ratio}, opset, outputs)
    stored = {"ratio": np.array(ratio, np.float32), **more}
    return make_model("Dropout", {"data": DATA}, {}, opset, outputs, stored)


@pytest.mark.parametrize("opset", [6, 7, 10, 12, 13, 22])
def test_dropout_is_the_identity_in_evaluation_mode(opset: int) -> None:
    result, mask = run(_dropout(opset), DATA)
    assert torch.equal(result, DATA)
    assert mask.all()
    assert mask.dtype == (torch.float32 if opset < 10 else torch.bool)


@pytest.mark.parametrize("opset", [6, 7, 10, 12, 13, 22])
def test_dropout_drops_its_share_in_training_mode(opset: int) -> None:
    """Kept elements are scaled by 1 / (1 - ratio), the mask says which; the share is within four deviations."""
    torch.manual_seed(0)
    result, mask = run(_dropout(opset), DATA, training=True)
    kept = mask.bool()
    torch.testing.assert_close(result, torch.where(kept, DATA / 0.75, 0))
    deviation = (0.25 * 0.75 / DATA.numel()) ** 0.5
    assert abs(kept.float().mean().item() - 0.75) < 4 * deviation
    single = run(_dropout(opset, outputs=1), DATA, training=True)
    assert abs((single == 0).float().mean().item() - 0.25) < 4 * deviation


def test_a_stored_mode_does_not_decide_but_an_input_does() -> None:
    """The exporter stores training_mode as a constant; as an input of the graph its value decides."""
    for stored in (True, False):
        model = _dropout(13, training_mode=np.array(stored))
        assert torch.equal(run(model, DATA)[0], DATA)
        assert not torch.equal(run(model, DATA, training=True)[0], DATA)
    inputs = {"data": DATA, "ratio": np.array(0.5, np.float32), "training_mode": np.array(True)}
    model = make_model("Dropout", inputs, {}, 13)
    for training in (False, True):
        assert not torch.equal(run(model, *inputs.values(), training=training), DATA)
        off = run(model, DATA, torch.tensor(0.5), torch.tensor(False), training=training)
        assert torch.equal(off, DATA)


def test_a_ratio_of_zero_drops_nothing() -> None:
    assert torch.equal(run(_dropout(13, ratio=0.0), DATA, training=True)[0], DATA)


def test_dropout_passes_the_gradient_of_what_it_kept() -> None:
    data = DATA.clone().requires_grad_()
    result, mask = run(_dropout(13), data, training=True)
    result.sum().backward()
    torch.testing.assert_close(data.grad, mask / 0.75)


def test_a_ratio_of_one_is_refused() -> None:
    with pytest.raises(NodeError, match=r"ratio is 1\.0; expected a number from 0 up to, but not including, 1"):
        run(_dropout(13, ratio=1.0), DATA, training=True)


@pytest.mark.parametrize("opset", [7, 22])
@pytest.mark.parametrize("like", [False, True])
def test_normal_and_uniform_numbers(opset: int, like: bool) -> None:
    """Mean and deviation within five standard errors; the run's seed repeats them, the attribute does not."""
    shape = {} if like else {"shape": [200, 100]}
    inputs = {"input": np.zeros((200, 100), np.float64)} if like else {}
    normal = make_model(
        "RandomNormal" + "Like" * like, inputs, {**shape, "mean": 2.0, "scale": 3.0, "seed": 5.0}, opset
    )
    uniform = make_model("RandomUniform" + "Like" * like, inputs, {**shape, "low": -1.0, "high": 3.0}, opset)
    net = onward.to_torch(normal)
    given = [torch.from_numpy(value) for value in inputs.values()]
    torch.manual_seed(0)
    first, second = net(*given), net(*given)
    torch.manual_seed(0)
    assert torch.equal(net(*given), first)
    assert not torch.equal(first, second)
    assert first.dtype == (torch.float64 if like else torch.float32)
    assert abs(first.mean().item() - 2) < 5 * 3 / 20000**0.5
    assert abs(first.std().item() - 3) < 5 * 3 / 40000**0.5
    flat = run(uniform, *given)
    assert flat.min() >= -1
    assert flat.max() < 3
    assert abs(flat.mean().item() - 1) < 5 * (4 / 12**0.5) / 20000**0.5


@pytest.mark.parametrize(
    ("code", "dtype"), [(None, torch.float32), (11, torch.float64), (7, torch.int64), (9, torch.bool)]
)
def test_bernoulli_draws_with_the_given_probabilities(code: int | None, dtype: torch.dtype) -> None:
    probabilities = torch.tensor([0.0, 0.3, 1.0]).repeat(4000, 1)
    attributes = {} if code is None else {"dtype": code}
    drawn = run(make_model("Bernoulli", {"input": probabilities}, attributes, 22), probabilities)
    assert drawn.dtype == dtype
    share = drawn.double().mean(0)
    assert share[0] == 0
    assert share[2] == 1
    assert abs(share[1].item() - 0.3) < 5 * (0.21 / 4000) ** 0.5


def test_multinomial_draws_from_unnormalized_log_probabilities() -> None:
    weights = torch.tensor([[1.0, 2.0, 5.0], [0.0, 4.0, 4.0]])
    model = make_model("Multinomial", {"input": weights}, {"sample_size": 8000, "dtype": 7}, 22)
    drawn = run(model, weights.log() + 3)
    assert drawn.shape == (2, 8000)
    assert drawn.dtype == torch.int64
    shares = torch.stack([(drawn == label).double().mean(1) for label in range(3)], dim=1)
    torch.testing.assert_close(shares, weights.double() / 8, rtol=0, atol=0.03)
