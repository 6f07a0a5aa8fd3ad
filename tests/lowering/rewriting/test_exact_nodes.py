"""A teacher in mixed precision: computed in the types of its own file, next to a student as it is without one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from tests.graph.distillation.test_adding import save_teacher, with_output
from tests.mlp import build_mlp, data, start


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("use_bfloat16", [True, False], ids=["bf16", "fp16"])
def test_mixed_precision_leaves_a_teacher_as_it_is(tmp_path: Path, dtype: type, use_bfloat16: bool) -> None:
    """Its values are those of ONNX Runtime in its own type; the student's are those without it."""
    save_teacher(tmp_path, dtype=dtype)
    precision = {"use_mixed_precision": True, "use_bfloat16": use_bfloat16}
    plain, recorder = start(tmp_path, mixed_precision=precision, tensorboard={"norm_names": ["logits"]})
    asked = {"teacher_path": tmp_path / "teacher.onnx"}
    names = {"norm_names": ["logits", "teacher/scores", "teacher/h1"]}
    runner, watched = start(tmp_path, distillation=asked, mixed_precision=precision, tensorboard=names)
    for one in (plain, runner):
        one.run(InMemoryDataLoader(data(32)))
    assert torch.equal(watched.steps[0].tensors["logits"], recorder.steps[0].tensors["logits"])
    session = onnxruntime.InferenceSession(with_output(tmp_path / "teacher.onnx", "h1"))
    for name, values in zip(("scores", "h1"), session.run(None, {"x": data(32)["x"][:4].astype(dtype)}), strict=True):
        exact = watched.steps[0].tensors[f"teacher/{name}"]
        rtol, atol = (1e-5, 1e-5) if dtype is np.float32 else (2e-3, 2e-3)
        torch.testing.assert_close(exact, torch.from_numpy(values), rtol=rtol, atol=atol)


def test_a_student_may_have_a_teachers_names(tmp_path: Path) -> None:
    """Without distillation, what the user calls a teacher is trained like everything else."""
    model = build_mlp()
    losses = []
    for prefix in ("", "teacher/"):
        for node in model.graph.node:
            node.name = f"{prefix}{node.name}"
            node.input[1:] = [f"{prefix}{name}" for name in node.input[1:]]
        for tensor in model.graph.initializer:
            tensor.name = f"{prefix}{tensor.name}"
        onnx.save(model, tmp_path / "mlp.onnx")
        runner, recorder = start(tmp_path, mixed_precision={"use_mixed_precision": True, "use_bfloat16": True})
        runner.run(InMemoryDataLoader(data(32)))
        losses.append([report.loss for report in recorder.steps])
    assert losses[0] == losses[1]
