"""`onward export`: a checkpoint and the model it was trained from give the file that `end_training` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from onward.artifacts.trained_model import export_checkpoint
from onward.cli import main
from onward.errors import CheckpointError, ModelError, ParametersError, StorageError
from onward.graph.writing import model_saving
from tests.artifacts.trained_run import convolutional_model, samples, train
from tests.initializers import stored_arrays


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(folder)
    return folder


def scores(path: Path, count: int = 16) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"image": samples(count)["image"]})
    return np.asarray(found)


def test_equals_what_end_training_wrote(run: Path, tmp_path: Path) -> None:
    path = export_checkpoint(run / "model.onnx", run / "checkpoints", tmp_path / "deep" / "trained.onnx")
    assert path == tmp_path / "deep" / "trained.onnx"
    assert path.read_bytes() == (run / "out" / "model_trained.onnx").read_bytes()
    onnx.checker.check_model(path, full_check=True)
    before = stored_arrays(run / "model.onnx")
    after = stored_arrays(path)
    assert not np.array_equal(before["fc.weight"], after["fc.weight"])
    assert not np.array_equal(before["norm.mean"], after["norm.mean"])


def test_one_checkpoint_of_several_can_be_chosen(run: Path, tmp_path: Path) -> None:
    (checkpoint,) = run.glob("checkpoints/checkpoint-*")
    path = export_checkpoint(str(run / "model.onnx"), str(checkpoint), str(tmp_path / "trained.onnx"))
    assert path.read_bytes() == (run / "out" / "model_trained.onnx").read_bytes()


def test_weights_that_did_not_train_keep_their_values(tmp_path: Path) -> None:
    train(tmp_path, weights_not_to_train=["fc.*"])
    path = export_checkpoint(tmp_path / "model.onnx", tmp_path / "checkpoints", tmp_path / "again.onnx")
    assert path.read_bytes() == (tmp_path / "out" / "model_trained.onnx").read_bytes()
    before = stored_arrays(tmp_path / "model.onnx")
    after = stored_arrays(path)
    assert np.array_equal(before["fc.weight"], after["fc.weight"])
    assert not np.array_equal(before["conv.weight"], after["conv.weight"])


def test_a_checkpoint_of_another_model(run: Path, tmp_path: Path) -> None:
    other = convolutional_model(batch_norm=False)
    onnx.save(other, tmp_path / "other.onnx")
    words = (
        r"is of another model: of its 7 weights and running statistics, 4 are not in '.*other.onnx' with these shapes"
    )
    with pytest.raises(CheckpointError, match=words) as caught:
        export_checkpoint(tmp_path / "other.onnx", run / "checkpoints", tmp_path / "trained.onnx")
    assert "'norm.bias' [4]" in str(caught.value)
    assert "Give the ONNX file that was trained." in str(caught.value)
    assert not (tmp_path / "trained.onnx").exists()


def test_a_checkpoint_that_lacks_running_statistics(run: Path, tmp_path: Path) -> None:
    model = convolutional_model()
    model.graph.node[1].input[3] = "norm.other_mean"
    mean = next(t for t in model.graph.initializer if t.name == "norm.mean")
    mean.name = "norm.other_mean"
    model.graph.initializer.add().CopyFrom(numpy_helper.from_array(np.zeros(4, np.float32), "norm.mean"))
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(CheckpointError, match=r"it lacks 1 running statistics of '.*', the first 'norm.other_mean'"):
        export_checkpoint(tmp_path / "other.onnx", run / "checkpoints", tmp_path / "trained.onnx")


def test_what_is_missing_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing.onnx' does not exist"):
        export_checkpoint(tmp_path / "nothing.onnx", run / "checkpoints", tmp_path / "trained.onnx")
    with pytest.raises(CheckpointError, match="nothing"):
        export_checkpoint(run / "model.onnx", tmp_path / "nothing", tmp_path / "trained.onnx")
    with pytest.raises(ParametersError, match="int8-static needs --calibration-data DIR"):
        export_checkpoint(run / "model.onnx", run / "checkpoints", tmp_path / "t.onnx", quantize="int8-static")
    with pytest.raises(ParametersError, match="'int4' is unknown; use fp16, int8-dynamic or int8-static"):
        export_checkpoint(run / "model.onnx", run / "checkpoints", tmp_path / "t.onnx", quantize="int4")
    (tmp_path / "file").write_text("no folder")
    for optimize in (False, True):
        with pytest.raises(StorageError, match="cannot be written"):
            export_checkpoint(run / "model.onnx", run / "checkpoints", tmp_path / "file" / "t.onnx", optimize=optimize)


def test_optimized(run: Path, tmp_path: Path) -> None:
    """Outputs equal to 1e-5, fewer nodes: the shape arithmetic and the dropout go."""
    path = export_checkpoint(run / "model.onnx", run / "checkpoints", tmp_path / "small.onnx", optimize=True)
    onnx.checker.check_model(path, full_check=True)
    np.testing.assert_allclose(scores(path), scores(run / "out" / "model_trained.onnx"), rtol=1e-5, atol=1e-5)
    before, after = (len(onnx.load(p).graph.node) for p in (run / "model.onnx", path))
    assert after < before
    assert [p.name for p in tmp_path.iterdir()] == ["small.onnx"]


@pytest.mark.parametrize("quantize", [None, "fp16", "int8-dynamic"])
def test_large_models_stay_external_through_every_tool(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: str | None
) -> None:
    """With the limit at 1,000 bytes every step of the way is on a file with external data."""
    for module in ("graph.writing.model_saving", "artifacts.quantization"):
        monkeypatch.setattr(f"onward.{module}.EXTERNAL_ABOVE_BYTES", 1000)
    assert model_saving.EXTERNAL_ABOVE_BYTES == 1000
    path = export_checkpoint(
        run / "model.onnx", run / "checkpoints", tmp_path / "large.onnx", optimize=True, quantize=quantize
    )
    # Weights of 8 bits are below the limit.
    data = [] if quantize == "int8-dynamic" else ["large.onnx.data"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["large.onnx", *data]
    expected = scores(run / "out" / "model_trained.onnx")
    bound = {None: 1e-5, "fp16": 2e-3, "int8-dynamic": 5e-2}[quantize]
    assert np.abs(scores(path) - expected).max() <= bound * np.abs(expected).max()


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(run / "model.onnx"), "--checkpoint", str(run / "checkpoints")]
    assert main([*arguments, "-o", str(tmp_path / "trained.onnx"), "--optimize", "--quantize", "fp16"]) == 0
    assert f"wrote {tmp_path / 'trained.onnx'}" in capsys.readouterr().out
    assert main([*arguments, "-o", str(tmp_path / "t.onnx"), "--quantize", "int8-static"]) == 2
    assert "--calibration-data DIR" in capsys.readouterr().err
