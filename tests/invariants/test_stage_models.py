"""A network that comes as one model for each stage trains, and leaves, like the models joined into one."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import onnxruntime
import torch

from onward.cli import main
from onward.plan.pipeline.joined_models import join_stage_models
from tests.initializers import stored_arrays
from tests.invariants.cases import Case, random
from tests.invariants.layouts import Layout, assert_follows, train
from tests.plan.staged_models import first_stage, second_stage

LOSS = {"type": "mean_squared_error", "prediction": "logits", "label": "y"}


def joined() -> ir.Model:
    return join_stage_models([first_stage(), second_stage()])


def test_stage_models_need_no_whole_model(tmp_path: Path) -> None:
    case = Case(joined, LOSS, lambda count: {"x": random((count, 4)), "y": random((count, 4), seed=1)})
    expected = train(case, Layout(), accumulation=2)
    files = [tmp_path / "first.onnx", tmp_path / "second.onnx"]
    for file, model in zip(files, (first_stage(), second_stage()), strict=True):
        ir.save(model, file)
    sections = {
        "paths": {
            "model_path": None,
            "model_with_loss_func_path": str(tmp_path / "with_loss.onnx"),
            "output_dir": str(tmp_path / "out"),
        },
        "checkpoint": {"checkpoints_dir": str(tmp_path / "checkpoints")},
    }
    stages = Layout(pipeline=2, distributed={"pipeline_stage_paths": [str(file) for file in files]})
    found = train(case, stages, accumulation=2, sections=sections)
    assert_follows(found, expected, of_losses=1e-6, of_weights=1e-6)

    trained = tmp_path / "out" / "joined_trained.onnx"
    arrays = stored_arrays(trained)
    assert set(arrays) == {"tied", "constant", "stage1/constant", "last"}
    for name, array in arrays.items():
        assert torch.equal(torch.from_numpy(array.copy()), found.tensors[f"weights/{name}"])
    again = tmp_path / "again.onnx"
    main(["export", *map(str, files), "--checkpoint", str(tmp_path / "checkpoints"), "-o", str(again)])
    assert again.read_bytes() == trained.read_bytes()

    feeds = case.data(3)
    session = onnxruntime.InferenceSession(tmp_path / "with_loss.onnx", providers=["CPUExecutionProvider"])
    outputs = dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds), strict=True))
    squares = (outputs["logits"] - feeds["y"]) ** 2
    assert abs(outputs["loss"] - squares.mean()) < 1e-6
