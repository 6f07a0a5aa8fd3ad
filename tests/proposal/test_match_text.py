"""`onward init` on conversations: packed ones train, preferences with their own loss; others are packed first."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir
import pytest

from onward.cli import main
from onward.data.packing import PackOptions, pack
from onward.data.packing.options import ChatOptions, ConversationOptions, PreferenceOptions
from onward.parameters import Parameters
from tests.data.packing.chat.test_sequences import many, write_rows
from tests.plan.staged_models import Sketch

pytest.importorskip("tokenizers")


def write_model(folder: Path) -> None:
    """A language model of bytes that reads token ids alone."""
    sketch = Sketch(seed=3)
    ids = sketch.input("input_ids", ["batch", "sequence"], ir.DataType.INT64)
    value = sketch.node("Gather", "embedded", sketch.weight("table", 259, 8), ids)
    value = sketch.node("MatMul", "logits", value, sketch.weight("head.weight", 8, 259))
    value.shape = ir.Shape(["batch", "sequence", 259])
    ir.save(sketch.model(value), folder / "model.onnx")


def packed(folder: Path, options: ConversationOptions) -> Path:
    rows = many(40)
    if isinstance(options, PreferenceOptions):
        turns = [row["messages"] for row in rows]
        rows = [{"prompt": a["content"], "chosen": b["content"], "rejected": "no"} for a, b in turns]
    source = write_rows(folder / "rows.jsonl", rows)
    pack(source, folder / "data", PackOptions(source=options, test_fraction=0.2, progress=False))
    return folder / "data"


@pytest.mark.parametrize(
    ("options", "loss", "metric"),
    [
        (ChatOptions(sequence_length=80), "softmax_cross_entropy", "accuracy"),
        (PreferenceOptions(sequence_length=80), "dpo", "preference_accuracy"),
    ],
)
def test_packed_conversations_train_as_proposed(
    options: ConversationOptions, loss: str, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    packed(tmp_path, options)
    assert main(["init", "model.onnx", "data"]) == 0
    asked = Parameters.load("run.yaml")
    assert (asked.loss.type, asked.loss.prediction, asked.loss.label) == (loss, "logits", "labels")
    assert asked.loss.ignore_index == -100
    text = Path("run.yaml").read_text()
    assert "wizard" not in text, "nobody chose anything"
    assert (asked.learning_rate.initial_lr == 5e-6) is (loss == "dpo"), "as small as preferences need it"
    assert ("# Every sample is a pair of answers, a chosen and a rejected one." in text) is (loss == "dpo")
    assert main(["train", "run.yaml", "--training.num_epochs", "1"]) == 0
    lines = [
        json.loads(line)
        for path in (tmp_path / "trained").rglob("metrics.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert any(metric in json.dumps(line) for line in lines)


@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_conversations_are_packed_first(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path)
    rows = many(2) if kind == "chat" else [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    assert main(["init", str(tmp_path / "model.onnx"), str(source)]) == 2
    said = capsys.readouterr().err
    assert "holds conversations" in said
    assert f"DEST --kind {kind} --tokenizer FOLDER, and pass DEST instead." in " ".join(said.split())
