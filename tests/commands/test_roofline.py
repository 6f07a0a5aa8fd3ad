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
    assert re.search(r"micro-batch +2 samples, [\d.]+ [kMG]FLOP forward and backward", text)
    operations = 3 * 2 * (2 * 8) * 16 * 64 * 2 / 1e3
    assert re.search(
        rf"Linear 16x64 +2 +{operations:.1f} kFLOP +[\d.]+ kB +\d+ +[\d.]+ ns +36\.0 µs +[\d.]+% +launches", text
    )
    # Computed again in the backward pass, and read and written there all the same: three times two passes in bf16.
    assert re.search(rf"Gelu +2 +0 +{3 * 2 * (2 * 8) * 64 * 2 * 2 / 1e3:.1f} kB", text)
    assert re.search(
        r"What to do\n  launches: \d+% of the time; raise training.batch_size, or set speed.compile or", text
    )
    assert "auto: bf16, which the GPU computes in" in text
    assert re.search(r"ceiling +[\d.]+% MFU, ", text)


def test_a_layout_is_left_out_and_said_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, run, "--roofline", "--gpu", "h200", "--distributed.data_parallel_size=4")
    assert "the section distributed is left out: one device trains the entire network." in text
    assert "h200: 56.95 TFLOP/s in fp32 and 3.84 TB/s attainable" in text


def test_what_goes_with_a_layout_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, run, "--roofline", "--ranks", "8")
    assert "--roofline is of one device; leave --ranks, --image and --write out." in error
    for option in (("--explain",), ("--memory-gb", "3"), ("--nodes-of", "2")):
        error = refused(capsys, run, "--roofline", *option)
        assert "--roofline does not use --explain, --nodes-of and --memory-gb; leave them out." in error


@pytest.mark.parametrize("what", [["--roofline"], ["--ranks", "2"]])
def test_types_are_those_of_the_gpu(what: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compute capabilities: https://developer.nvidia.com/cuda-gpus."""
    low, bf16 = "--mixed_precision.use_mixed_precision", "--mixed_precision.use_bfloat16=true"
    text = printed(capsys, run, *what, "--gpu", "v100", f"{low}=auto")
    assert "auto: the model's own types, since the GPU does not compute in bf16." in text
    error = refused(capsys, run, *what, "--gpu", "t4", f"{low}=true", bf16)
    assert "mixed_precision asks for bf16, but t4 (compute capability 7.5) has no bf16 matmuls" in error
    error = refused(capsys, run, *what, "--gpu", "a100", "--mixed_precision.float8=true")
    assert "mixed_precision.float8 is true, but a100 (compute capability 8.0) has no FP8 matmuls" in error
    text = printed(capsys, run, *what, "--gpu", "h100", f"{low}=true", bf16, "--mixed_precision.float8=true")
    assert "mixed_precision.float8: no FP8 rates are known, so that matmuls are forecast in bf16." in text
