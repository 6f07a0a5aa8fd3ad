"""A proposal in a few lines, and what is said where nothing can be proposed."""

from __future__ import annotations

from pathlib import Path

from onward.proposal.proposal import Choice, Proposal, Question
from onward.proposal.summary import describe_proposal, summary_lines


def test_lines() -> None:
    made = Proposal(
        model=Path("net.onnx"), data=None, task="classification", notes=("slow",),
        choices=(Choice("loss.type", "l1", "why."), Choice("loss.prediction", "y"), Choice("training.num_epochs", 3)),
        questions=(Question("k", "Which?", "this"),),
    )  # fmt: skip
    assert summary_lines(made) == [
        "task: classification, from output 'y'", "loss: l1 (why)", "epochs: 3",
        "please check: Which? Assumed: this.", "note: slow",
    ]  # fmt: skip


def test_a_model_that_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "none.onnx")
    told = describe_proposal(path, None)
    assert told.startswith(f"`onward init {path} [DATA]` would refuse: ")
    assert "none.onnx" in told
