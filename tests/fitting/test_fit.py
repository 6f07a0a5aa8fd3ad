"""`onward.fit`: the losses of plain torch on the original module, every kind of data, resume, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import onward
from onward.engine.callbacks import Callback
from onward.engine.reports import StepReport
from onward.errors import DataError
from onward.parameters import Loss
from tests.fitting.pairs import DATA, PAIR, Original, fit, torch_loader
from tests.mlp import data, save_mlp, write_shards

LOSSES = {
    "cross_entropy": ("label", torch.nn.functional.cross_entropy),
    "mean_squared_error": ("target", torch.nn.functional.mse_loss),
    "l1": ("target", torch.nn.functional.l1_loss),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_equal_those_of_plain_torch(loss: str, accumulation: int) -> None:
    """Three epochs of AdamW over the original module in a loop by hand: every loss and weight to 1e-6."""
    label, function = LOSSES[loss]
    given = {"x": DATA["x"], label: DATA[label]}
    result = fit(
        given, loss=loss, epochs=3.2, shuffle=False, learning_rate=0.01, gradient_accumulation_steps=accumulation
    )
    module = Original()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.0)
    x, y = torch.from_numpy(DATA["x"]), torch.from_numpy(DATA[label])
    expected = []
    for update in range(16 // accumulation):
        losses = []
        for part in range(accumulation):
            rows = slice(8 * ((update * accumulation + part) % 5), 8 * ((update * accumulation + part) % 5) + 8)
            value = function(module(x[rows]), y[rows])
            (value / accumulation).backward()
            losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
        expected.append(np.mean(losses))
    assert result.history.loss == pytest.approx(expected, abs=1e-6, rel=1e-6)
    trained = dict(zip(("w1", "b1", "w2", "b2"), module.parameters(), strict=True))
    for name, tensor in trained.items():
        expected_weight = tensor.T if tensor.ndim == 2 else tensor
        torch.testing.assert_close(result.net.weights[name], expected_weight, rtol=1e-5, atol=1e-6)


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": DATA["x"].tolist(), "label": DATA["label"].tolist()})


def pandas_frame() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({**{f"x{i}": DATA["x"][:, i] for i in range(6)}, "label": DATA["label"]})


@pytest.mark.parametrize("kind", ["tuple", "loader", "Hugging Face", "pandas", "list of samples", "folder", "file"])
def test_every_kind_of_data_trains_alike(kind: str, tmp_path: Path) -> None:
    features = {"x": DATA["x"], "label": DATA["label"]}
    np.savez(tmp_path / "data.npz", **features)
    kinds: Mapping[str, Any] = {
        "tuple": lambda: PAIR,
        "loader": torch_loader,
        "Hugging Face": hugging_face,
        "pandas": pandas_frame,
        "list of samples": lambda: [{"x": x, "label": y} for x, y in zip(*PAIR, strict=True)],
        "folder": lambda: write_shards(tmp_path / "shards", features, files=1),
        "file": lambda: tmp_path / "data.npz",
    }
    result = fit(kinds[kind](), epochs=2, shuffle=False)
    assert result.history.loss == pytest.approx(fit(features, epochs=2, shuffle=False).history.loss, abs=1e-6)
    assert result.summary.steps == 10


def test_validation_after_every_epoch_and_at_the_end(tmp_path: Path) -> None:
    result = fit(epochs=3, validation_data=(DATA["x"][:16], DATA["label"][:16]), learning_rate=0.05)
    assert result.history.evaluations["step"] == [5, 10, 15]
    assert set(result.metrics) == {"loss", "accuracy"}
    assert result.history.evaluations["loss"][-1] == result.metrics["loss"]
    assert result.evaluate((DATA["x"][:16], DATA["label"][:16])) == result.metrics
    assert result.metrics["loss"] < result.history.evaluations["loss"][0]
    path = result.export(tmp_path / "trained.onnx")
    (logits,) = onnxruntime.InferenceSession(path).run(None, {"x": DATA["x"]})
    np.testing.assert_allclose(result.net(torch.from_numpy(DATA["x"])).detach().numpy(), logits, atol=1e-6)


def test_a_share_of_the_data_is_held_out() -> None:
    result = fit(epochs=2, validation_fraction=0.2)
    assert result.summary.steps == 8  # 32 samples are left
    assert result.history.evaluations["step"] == [4, 8]
    other = fit(epochs=2, validation_fraction=0.2, seed=1)
    assert other.metrics != result.metrics


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    one, two, other = (fit(epochs=2, seed=seed) for seed in (0, 0, 1))
    assert one.history.loss == two.history.loss
    assert one.history.loss != other.history.loss


class Power(Exception):
    pass


class Cut(Callback):
    def on_step(self, report: StepReport) -> None:
        if report.step == 4:
            raise Power


def test_a_fit_that_was_killed_resumes(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"epochs": 2, "parameters": {"checkpoint": {"checkpoint_period": 3}}}
    whole = fit(checkpoints_dir=tmp_path / "whole", **changes)
    with pytest.raises(Power) as failed:
        fit(checkpoints_dir=tmp_path / "cut", callbacks=[Cut()], **changes)
    assert failed.value.__notes__[-1].startswith(
        "checkpoints_dir holds checkpoint-00000004: a fit with the same checkpoints_dir resumes from it, whatever"
    )
    resumed = fit(checkpoints_dir=tmp_path / "cut", output_dir=tmp_path / "out", **changes)
    assert (whole.resumed_update, resumed.resumed_update) == (None, 4)
    assert "resumed after 4" in repr(resumed)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["resumed_update"], len(record["resumed"])) == (4, 1)
    assert resumed.history.loss == whole.history.loss[4:]
    for name, weight in whole.net.weights.items():
        assert torch.equal(weight, resumed.net.weights[name])


def test_further_fields_and_files(tmp_path: Path) -> None:
    result = fit(
        model=save_mlp(tmp_path),
        steps=6,
        weights_not_to_train=["b*"],
        output_dir=tmp_path / "out",
        log_dir=tmp_path / "log",
        parameters={"learning_rate": {"warmup_mode": "linear", "warmup_steps": 2}, "loss": {"reduction": "sum"}},
    )
    assert (tmp_path / "out" / "mlp_trained.onnx").is_file()
    assert (tmp_path / "log" / "metrics.jsonl").read_text().count('"kind": "step"') == 6
    assert len(list((tmp_path / "log").glob("events.out.tfevents*"))) == 1
    assert set(result.net.weights) == {"w1", "w2"}
    assert result.parameters.loss.reduction == "sum"
    assert result.history.steps["learning_rate"][:2] == [5e-4, 1e-3]


def test_the_model_in_memory_and_named_losses() -> None:
    loss = Loss(type="softmax_cross_entropy", prediction="logits", label="kind")
    given = {"x": DATA["x"], "kind": DATA["label"]}
    one = fit(given, loss=loss, steps=3)
    two = fit(given, loss={"type": "softmax_cross_entropy", "prediction": "logits", "label": "kind"}, steps=3)
    three = fit((DATA["x"], DATA["label"]), label="kind", steps=3)
    four = fit({"pixels": DATA["x"], "class": DATA["label"]}, input_name_map={"pixels": "x"}, steps=3)
    assert one.history.loss == two.history.loss == three.history.loss == four.history.loss


def test_progress_is_shown_once_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    fit(steps=3)
    assert capsys.readouterr().out == ""
    fit(steps=3, progress=True)
    out = capsys.readouterr().out
    assert out.count("train  step 1/3") == out.count("train  step 3/3") == out.count("summary") == 1


def test_a_generator_trains_for_the_steps_it_has() -> None:
    rows = [slice(8 * i, 8 * i + 8) for i in range(5)]
    result = fit(((DATA["x"][r], DATA["label"][r]) for r in rows), steps=5)
    assert result.history.loss == pytest.approx(fit(steps=5, shuffle=False).history.loss, abs=1e-6)
    with pytest.raises(DataError, match="training data ended after 5 batches"):
        fit(((DATA["x"][r], DATA["label"][r]) for r in rows), steps=6)


def own_loss(outputs: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs["logits"], batch["label"])


def share(outputs: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (outputs["logits"].argmax(1) == batch["label"]).float().mean()


def test_own_loss_and_metrics() -> None:
    options: dict[str, Any] = {"epochs": 2, "validation_fraction": 0.2}
    mine, built_in = fit(loss=own_loss, metrics={"share": share}, **options), fit(**options)
    assert mine.history.loss == pytest.approx(built_in.history.loss, abs=1e-6)
    assert mine.metrics["loss"] == pytest.approx(built_in.metrics["loss"], abs=1e-6)
    assert mine.metrics["share"] == built_in.metrics["accuracy"]
    for name, weight in mine.net.weights.items():
        torch.testing.assert_close(weight, built_in.net.weights[name], rtol=1e-6, atol=1e-6)


def test_a_file_is_packed_as_proposed_and_tested_with_its_share(tmp_path: Path) -> None:
    many = data(200)
    np.savez(tmp_path / "data.npz", pixels=many["x"], species=many["label"])
    result = fit(tmp_path / "data.npz", loss=None, epochs=2)
    assert set(result.metrics) == {"loss", "accuracy"}
    assert 20 < 200 - result.summary.samples / 2 < 60  # about a fifth is held out


def test_a_named_binary_loss_takes_logits_and_counts_what_is_right() -> None:
    """Logits that were taken for probabilities trained to a loss of 60, without a word."""
    labels = (DATA["x"].sum(axis=1) > 0).astype(np.int64)
    model = _one_output()
    result = onward.fit(
        model, (DATA["x"], labels), loss="bce", epochs=30, batch_size=8, learning_rate=0.05,
        validation_data=(DATA["x"], labels), progress=False,
    )  # fmt: skip
    scores = result.net(torch.from_numpy(DATA["x"])).detach().reshape(-1)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.from_numpy(labels).float())
    assert result.metrics["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert result.metrics["accuracy"] == pytest.approx(float(((scores > 0).numpy() == labels).mean()))
    assert result.metrics["loss"] < 0.5


def _one_output() -> onnx.ModelProto:
    """A perceptron with one logit a sample."""
    torch.manual_seed(0)
    size = DATA["x"].shape[1]
    net = torch.nn.Sequential(torch.nn.Linear(size, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    stream = io.BytesIO()
    axes = {"x": {0: "batch"}, "score": {0: "batch"}}
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["score"], "dynamic_axes": axes}
    torch.onnx.export(net, (torch.zeros(2, size),), stream, dynamo=False, **names)
    return onnx.load_from_string(stream.getvalue())


def test_lists_of_numbers_are_arrays() -> None:
    expected = fit({"x": DATA["x"], "label": DATA["label"]}, shuffle=False).history.loss
    assert fit((DATA["x"].tolist(), DATA["label"].tolist()), shuffle=False).history.loss == pytest.approx(expected)


def test_skipped_updates_are_in_the_result() -> None:
    x = DATA["x"].copy()
    x[3] = np.nan
    assert "1 updates skipped (gradients not finite)" in repr(fit((x, DATA["label"]), shuffle=False))


def test_a_long_fit_displays_at_most_a_hundred_updates() -> None:
    result = fit(epochs=41)
    assert result.summary.updates == 205
    assert 60 <= len(result.history.loss) <= 101


@pytest.mark.parametrize(("fields", "lines"), [({}, 21), ({"parameters": {"training": {"display_loss_steps": 1}}}, 60)])
def test_a_log_of_a_fit_has_about_twenty_training_lines(
    capsys: pytest.CaptureFixture[str], fields: dict[str, Any], lines: int
) -> None:
    assert len(fit(steps=60, progress=True, **fields).history.loss) == 60
    out = capsys.readouterr().out
    assert out.count("train  step ") == lines
    assert "train  step  1/60" in out
    assert "train  step 60/60" in out
