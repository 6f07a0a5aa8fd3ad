"""Modules exported for one batch size, by either of torch's exporters."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout

import onnx
import torch
from torch import Tensor, nn

IMAGE, STEPS, TOKENS = torch.randn(1, 3, 8, 8), torch.randn(1, 5, 6), torch.randint(0, 20, (1, 5))


def export(module: nn.Module, inputs: tuple[Tensor, ...], dynamo: bool) -> onnx.ModelProto:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        if dynamo:
            exported = torch.onnx.export(module, inputs, dynamo=True, opset_version=18, verbose=False)
            assert exported is not None
            return exported.model_proto
        file = io.BytesIO()
        torch.onnx.export(module, inputs, file, dynamo=False, opset_version=17)  # type: ignore[arg-type]
        return onnx.load_from_string(file.getvalue())
