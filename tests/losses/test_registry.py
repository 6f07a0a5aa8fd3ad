"""A loss is one file and one line: one that onward does not have, registered by that line, trains from RUN.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from onward.commands import wizard
from onward.errors import ParametersError
from onward.fitting.request import ModelPorts, Wanted, loss_of
from onward.graph.losses.spec import LossNames
from onward.graph.losses.writer import LossWriter
from onward.losses import registry
from onward.losses.kind import LossKind
from onward.parameters.fields import explain
from tests.mlp import parameters, train_by_torch, train_run, write_sgd_run


def _add(writer: LossWriter) -> LossNames:
    """Huber: q^2 / 2 + (|d| - q), where d is the difference and q = min(|d|, 1)."""
    difference = writer.apply("Abs", writer.apply("Sub", *writer.compared(writer.prediction())))
    near = writer.apply("Min", difference, writer.number(1.0, "one"))
    square = writer.apply("Mul", writer.apply("Mul", near, near), writer.number(0.5, "half"))
    cost = writer.apply("Add", square, writer.apply("Sub", difference, near), name="huber")
    return writer.finish(writer.reduced(cost, "huber_error"))


HUBER = LossKind(name="huber", add=_add, short_name="smooth")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LOSSES", (*registry.LOSSES, HUBER))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_new_loss_trains_from_run_yaml(tmp_path: Path, reduction: str) -> None:
    """To 1e-5 of torch's huber_loss, autograd and SGD, after 8 steps that change the weights by much more."""
    loss = {"type": "huber", "prediction": "logits", "label": "target", "reduction": reduction}
    trained = train_run(write_sgd_run(tmp_path, loss=loss, learning_rate={"initial_lr": 0.02}))
    expected = train_by_torch(lambda p, t: F.huber_loss(p, t, reduction=reduction), [0.02] * 8)
    unchanged = train_by_torch(lambda p, t: F.huber_loss(p, t, reduction=reduction), [0.0] * 8)
    for name, tensor in expected.items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-5)
        assert (tensor - unchanged[name]).abs().max() > 1e-3


def test_everything_that_lists_losses_lists_it(tmp_path: Path) -> None:
    assert "huber" in explain("loss.type")
    assert wizard._loss("hub") == "huber"
    asked = loss_of(Wanted(loss="smooth", prediction="y", label="t"), ModelPorts(tmp_path, {}, ("y",)), ())
    assert (asked.type, asked.prediction, asked.label) == ("huber", "y", "t")


def test_its_fields_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ParametersError, match=r"loss.label is missing; loss.type 'huber' needs it"):
        parameters(tmp_path, loss={"type": "huber", "prediction": "logits"})
    wrong = {"type": "huber", "prediction": "logits", "label": "target", "from_logits": True}
    with pytest.raises(ParametersError, match="belongs to binary_cross_entropy, focal or binary_dice, not to 'huber'"):
        parameters(tmp_path, loss=wrong)
    with pytest.raises(ParametersError, match="'output', 'function' or 'huber'"):
        parameters(tmp_path, loss={"type": "hubert"})
