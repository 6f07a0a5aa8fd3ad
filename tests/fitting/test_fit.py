"""`onward.fit`: the losses of plain torch on the original module, every kind of data, resume, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

import onward
from onward.engine.callbacks import Callback
from onward.engine.reports import StepReport
from onward.errors import DataError, ModelError, ParametersError
from onward.fitting.result import FitResult
from onward.parameters import Loss
from tests.mlp import build_mlp, data, save_mlp, weights, write_shards

DATA = data(40)
PAIR = (DATA["x"], DATA["label"])
ON_CPU = onward.Environment(execution_provider="CPU", threads=1)


def fit(given: Any = PAIR, **options: Any) -> FitResult:
    options = {"loss": "cross_entropy", "batch_size": 8, "progress": False, "environment": ON_CPU, **options}
    return onward.fit(options.pop("model", None) or build_mlp(), given, **options)


class Original(torch.nn.Module):
    """The network before it was exported."""

    def __init__(self) -> None:
        super().__init__()
        tensors = {name: torch.from_numpy(array) for name, array in weights().items()}
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 4)
        with torch.no_grad():
            for layer, weight, bias in ((self.first, "w1", "b1"), (self.second, "w2", "b2")):
                layer.weight.copy_(tensors[weight].T)
                layer.bias.copy_(tensors[bias])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


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


def torch_loader() -> Any:
    return TorchLoader(TensorDataset(*map(torch.from_numpy, PAIR)), batch_size=8)


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
    with pytest.raises(Power):
        fit(checkpoints_dir=tmp_path / "cut", callbacks=[Cut()], **changes)
    resumed = fit(checkpoints_dir=tmp_path / "cut", **changes)
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


def test_what_the_result_says() -> None:
    result = fit(steps=3, validation_fraction=0.2)
    assert repr(result).startswith("FitResult(3 updates, loss ")
    assert "; validation loss " in repr(result)
    assert repr(result.history).startswith("History(3 displayed updates, loss ")


def test_progress_is_shown_once_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    fit(steps=3)
    assert capsys.readouterr().out == ""
    fit(steps=3, progress=True)
    out = capsys.readouterr().out
    assert out.count("train  step 1/3") == out.count("train  step 3/3") == out.count("summary") == 1


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"loss": None, "given": iter([PAIR]), "steps": 1},
            ParametersError,
            r"loss is missing. The outputs of the model are 'logits'; the data hold 'x', 'label'. Pass loss='softmax",
        ),
        ({"loss": "hinge"}, ParametersError, r"loss is 'hinge'; expected one of softmax_cross_entropy.*cross_entropy"),
        ({"loss": 3}, ParametersError, r"loss is 3; expected a name, a Loss, or a function"),
        ({"loss": "bert"}, ParametersError, r"loss 'bert' needs further fields; pass loss=Loss"),
        ({"epochs": 2, "steps": 3}, ParametersError, r"epochs is 2 and steps is 3; pass one of the two"),
        ({"epochs": 0}, ParametersError, r"epochs is 0; expected a number above 0"),
        ({"validation_data": PAIR, "validation_fraction": 0.1}, ParametersError, r"both set; pass one of the two"),
        ({"parameters": {"training": 3}}, ParametersError, r"parameters\['training'\] is 3; expected a dictionary"),
        ({"parameters": {"training": {"bath": 3}}}, ParametersError, r"training.bath"),
        ({"given": iter([PAIR]), "epochs": 2}, DataError, r"epochs is 2, but the data are an iterator.*Pass a list"),
        ({"given": iter([PAIR])}, DataError, r"the data are an iterator of unknown length.*Pass steps="),
        (
            {"given": torch_loader(), "validation_fraction": 0.1},
            DataError,
            r"IteratedDataLoader cannot be split.*Pass validation_data",
        ),
        (
            {"given": {"x": DATA["x"], "a": DATA["label"], "b": DATA["label"]}},
            ParametersError,
            r"the loss needs one feature that is no input, and there are 2.*'x', 'a', 'b'. Pass label=",
        ),
        ({"given": {"x": DATA["x"]}}, ParametersError, r"the loss needs one feature .* there are 0.*the data hold 'x'"),
        ({"model": Original()}, ModelError, r"model is a torch module \(Original\).*torch.onnx.export"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fit(options.pop("given", PAIR), **options)


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


# ---------------------------------------------------------------------------------------- what is chosen where left out


def test_a_loss_that_is_left_out_is_chosen_from_model_and_data() -> None:
    """Classes for whole numbers, squares for others; what is given stays; the choice is reported with its reasons."""
    classes = fit(loss=None, steps=3, batch_size=None)
    assert (classes.parameters.loss.type, classes.parameters.loss.label) == ("softmax_cross_entropy", "label")
    (note,) = [text for text in classes.history.messages if text.startswith("loss was left out; chosen: ")]
    assert "loss.type: softmax_cross_entropy (the labels are class numbers" in note
    assert f"training.batch_size: {classes.parameters.training.batch_size} (" in note
    numbers = fit({"x": DATA["x"], "target": DATA["target"]}, loss=None, steps=3, learning_rate=0.5, batch_size=7)
    assert numbers.parameters.loss.type == "mean_squared_error"
    assert numbers.parameters.learning_rate.initial_lr == 0.5
    assert numbers.parameters.training.batch_size == 7
    assert fit(loss=None, epochs=2, optimizer="SGDOptimizer").parameters.optimizer.training_optimizer_name == (
        "SGDOptimizer"
    )


def test_other_names_are_matched() -> None:
    result = fit({"pixels": DATA["x"], "species": DATA["label"]}, loss=None, steps=3)
    assert dict(result.parameters.data.input_name_map) == {"pixels": "x"}
    assert result.parameters.loss.label == "species"


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


@pytest.mark.parametrize("name", ["label", "target", "y"])
def test_the_label_of_a_table_is_known_by_its_name(name: str) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(DATA["x"]).add_prefix("f").assign(**{name: DATA["label"]})
    expected = fit({"x": DATA["x"], "label": DATA["label"]}, shuffle=False).history.loss
    assert fit(frame, shuffle=False).history.loss == pytest.approx(expected, abs=1e-6)


def test_lists_of_numbers_are_arrays() -> None:
    expected = fit({"x": DATA["x"], "label": DATA["label"]}, shuffle=False).history.loss
    assert fit((DATA["x"].tolist(), DATA["label"].tolist()), shuffle=False).history.loss == pytest.approx(expected)


def test_skipped_updates_are_in_the_result() -> None:
    x = DATA["x"].copy()
    x[3] = np.nan
    assert "1 updates skipped (gradients not finite)" in repr(fit((x, DATA["label"]), shuffle=False))


class _Misspelt(Callback):
    def on_evaluaton(self, report: StepReport) -> None:
        """Almost a hook."""


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        (
            [_Misspelt()],
            r"_Misspelt\.on_evaluaton is never called, .* Did you mean on_evaluation\? The hooks are on_run_",
        ),
        ([Callback], r"callbacks holds the class Callback; pass an object of it: callbacks=\[Callback\(\)\]"),
        (
            Callback(),
            r"callbacks is a Callback; expected a list of onward\.Callback objects: callbacks=\[Callback\(\)\]",
        ),
        ([print], r"which is no callback\. Derive a class from onward\.Callback, override hooks such as on_evaluation"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks: Any, words: str) -> None:
    with pytest.raises(ParametersError, match=words):
        fit(callbacks=callbacks)


def test_a_long_fit_displays_at_most_a_hundred_updates() -> None:
    result = fit(epochs=41)
    assert result.summary.updates == 205
    assert 60 <= len(result.history.loss) <= 101
