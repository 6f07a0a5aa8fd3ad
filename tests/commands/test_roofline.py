"""`onward plan --roofline`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands.test_planning import printed, refused, run

__all__ = ["run"]  # the fixture


def test_gpt2_on_a_gpu(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A linear layer [16, 64] of 2 layers and 2 x 8 tokens: forward and two products backward, 2 a multiply-add."""
    text = printed(capsys, run, "--roofline", "--gpu", "h100", "--mixed_precision.use_mixed_precision=auto")
    assert re.search(r"device +h100: 613\.2 TFLOP/s in bf16 and 2\.68 TB/s attainable", text)
    assert re.search(r"micro-batch +2 samples, [\d.e-]+ TFLOP forward and backward", text)
    operations = 3 * 2 * (2 * 8) * 16 * 64 * 2 / 1e9
    assert re.search(rf"Linear 16x64 +2 +{operations:.1f} +[\d.]+ kB +\d+ +0\.000 +[\d.]+% +0\.036 +launches", text)
    assert "auto: bf16, which the GPU computes in" in text
    assert re.search(r"ceiling +[\d.]+% MFU, ", text)


def test_a_layout_is_left_out_and_said_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, run, "--roofline", "--gpu", "h200", "--distributed.data_parallel_size=4")
    assert "the section distributed is left out: one device trains the entire network." in text
    assert "h200: 56.95 TFLOP/s in fp32 and 3.84 TB/s attainable" in text


def test_what_goes_with_a_layout_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, run, "--roofline", "--ranks", "8")
    assert "--roofline is of one device; leave --ranks, --image and --write out." in error
