"""Options of `onward export` that do not go together, each in words and with exit code 2."""

from __future__ import annotations

import pytest

from onward.cli import main


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "",
            "Pass -o FILE with --checkpoint DIR for a trained model, or with --optimize or --quantize to convert MODEL",
        ),
        ("-o out.onnx", "Pass -o FILE with --checkpoint DIR"),
        ("--run r.yaml", "--run goes with --training-graph, --optimizer-graph, --train-step or --training-info FILE"),
        ("--training-graph t.onnx", "training graphs need a loss and an optimizer; name them with --run RUN.yaml."),
        ("--train-step t.onnx --run r.yaml -o out.onnx", "-o FILE, the trained model, needs --checkpoint DIR."),
        ("b.onnx --train-step t.onnx --run r.yaml", "training graphs are of one model; 2 are given."),
        (
            "-o o.onnx --optimize --weights last",
            "--weights last chooses weights of a checkpoint; pass --checkpoint DIR.",
        ),
        ("b.onnx -o o.onnx --optimize", "2 models are given; without --checkpoint DIR, pass one."),
        (
            "-o o.onnx --quantize fp16 --adapter peft",
            "--adapter peft writes adapters of a checkpoint; pass --checkpoint",
        ),
        ("--dequantize qdq", "--dequantize takes one MODEL and needs -o FILE."),
        ("--dequantize qdq -o o.onnx --optimize", "give it MODEL and -o FILE alone"),
    ],
)
def test_what_does_not_go_together(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "a.onnx", *options.split()]) == 2
    assert words in capsys.readouterr().err
