"""Activations of recurrent cells by name: parameters in order, the clip before them, and how many are expected."""

from __future__ import annotations

import pytest
import torch

from onward.lowering.kernels.cell_activations import name_activations, resolve_activations

X = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0])


def test_each_takes_the_next_of_the_parameters_that_it_has() -> None:
    names = ["Relu", "Affine", "tanh", "LeakyRelu", "HardSigmoid"]
    _, affine, _, leaky, hard = resolve_activations(names, [2.0, 0.1], [3.0], [None] * 5)
    torch.testing.assert_close(affine(X), 2 * X + 3)
    torch.testing.assert_close(leaky(X), torch.where(X < 0, 0.1 * X, X))
    torch.testing.assert_close(hard(X), (0.2 * X + 0.5).clamp(0, 1))  # the lists have ended: the standard's defaults


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ThresholdedRelu", X * (X > 1)),
        ("ScaledTanh", X.tanh()),
        ("Softsign", X / (1 + X.abs())),
        ("Softplus", X.exp().log1p()),
        ("Elu", torch.where(X < 0, X.exp() - 1, X)),
    ],
)
def test_formulas_of_the_standard(name: str, expected: torch.Tensor) -> None:
    (function,) = resolve_activations([name], None, None, [None])
    torch.testing.assert_close(function(X), expected)


def test_the_clip_bounds_what_goes_in() -> None:
    (function,) = resolve_activations(["Affine"], None, None, [1.0])
    assert function(X).tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"activation 'Swish' is not one of the standard's: affine, elu, .*thresholde"):
        resolve_activations(["Swish"], None, None, [None])


def test_defaults_are_for_every_direction_and_others_must_be_complete() -> None:
    assert name_activations(None, ["sigmoid", "tanh"], 2) == ["sigmoid", "tanh"] * 2
    assert name_activations(["Relu"], ["tanh"], 1) == ["relu"]
    with pytest.raises(ValueError, match=r"activations has 3 entries; 2 for each of 2 direction\(s\) are expected"):
        name_activations(["Relu"] * 3, ["sigmoid", "tanh"], 2)
