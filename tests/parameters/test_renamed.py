"""Renamed fields: the old name works, in a file, on the command line and in Python, with a warning of these words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from onward.cli import main
from onward.errors import ParametersError
from onward.parallel.rendezvous.launcher import LAUNCHED_BY_US
from onward.parameters import Parameters, Recompute
from onward.parameters.fields import field_names
from onward.parameters.renamed import RENAMED_FIELDS

SMALL: dict[str, Any] = {
    "paths": {"model_path": "model.onnx", "train_data_dir": "data", "output_dir": "out"},
    "loss": {"type": "mean_squared_error", "prediction": "p", "label": "y"},
    "training": {"batch_size": 2, "num_train_steps": 1},
    "learning_rate": {"initial_lr": 0.1},
}
NOTE = (
    r"{}recompute\.cheap_inputs is deprecated: it was renamed to recompute\.cheap_activations and keeps working\. "
    r"Set recompute\.cheap_activations instead\."
)


def test_every_row_names_a_field_that_is_there_and_one_that_is_not() -> None:
    fields = field_names()
    for old, new in RENAMED_FIELDS.items():
        assert old not in fields
        assert f"{old.partition('.')[0]}.{new}" in fields


def test_the_old_name_in_a_file_sets_the_field_and_warns() -> None:
    with pytest.warns(FutureWarning, match=f"^{NOTE.format('')}$"):
        parameters = Parameters.from_mapping({**SMALL, "recompute": {"cheap_inputs": False}})
    assert parameters == Parameters.from_mapping({**SMALL, "recompute": {"cheap_activations": False}})
    assert "cheap_inputs" not in parameters.to_mapping()["recompute"]


def test_a_later_round_may_use_the_old_name_where_the_first_uses_the_new_one() -> None:
    sections = {
        **SMALL,
        "recompute": {"cheap_activations": False},
        "next_rounds": [{"recompute": {"cheap_inputs": False}}],
    }
    with pytest.warns(FutureWarning, match=NOTE.format(re.escape("next_rounds[0]."))):
        parameters = Parameters.from_mapping(sections)
    assert not parameters.next_rounds[0].recompute.cheap_activations


def test_both_names_are_refused() -> None:
    words = (
        "recompute.cheap_inputs is the deprecated name of recompute.cheap_activations, and both are given; "
        "remove cheap_inputs."
    )
    with pytest.raises(ParametersError, match=f"^{re.escape(words)}$"):
        Parameters.from_mapping({**SMALL, "recompute": {"cheap_inputs": False, "cheap_activations": False}})


def test_python_takes_and_gives_the_old_name() -> None:
    with pytest.warns(FutureWarning, match=NOTE.format("")):
        recompute = Recompute(cheap_inputs=False)  # type: ignore[call-arg]
    assert recompute == Recompute(cheap_activations=False)
    assert recompute.cheap_inputs is False  # type: ignore[attr-defined]


def test_a_wrong_value_by_the_old_name_is_reported_by_the_new_one() -> None:
    with pytest.warns(FutureWarning), pytest.raises(ParametersError, match=r"recompute\.cheap_activations is 'yes'; "):
        Parameters.from_mapping({**SMALL, "recompute": {"cheap_inputs": "yes"}})


@pytest.mark.parametrize(("environment", "lines"), [({}, 1), ({"RANK": "1"}, 0), ({LAUNCHED_BY_US: "x"}, 0)], ids=str)
def test_the_command_line_prints_one_note_on_rank_0(
    environment: dict[str, str],
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The process that started others has printed it for them."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run.yaml").write_text("recompute: {cheap_inputs: false}\nnext_rounds: [{training: {seed: 1}}]\n")
    assert main(["plan", str(tmp_path / "run.yaml")]) == 2
    notes = [line for line in capsys.readouterr().err.splitlines() if "deprecated" in line]
    assert len(notes) == lines
    assert all(re.fullmatch(f"note   {NOTE.format('')}", line) for line in notes)
