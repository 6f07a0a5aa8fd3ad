"""Trackers that cannot be opened: named before any work, or reported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from onward.errors import ParametersError
from onward.runner import TrainingRunner
from tests.mlp import ON_ONE_THREAD, parameters, save_mlp


@pytest.mark.parametrize(("name", "field"), [("wandb", "project"), ("mlflow", "experiment"), ("aim", "experiment")])
def test_a_missing_package_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, field: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one, *rest: None if one == name else found(one, *rest))
    save_mlp(tmp_path)
    with pytest.raises(ParametersError) as caught:
        TrainingRunner(parameters(tmp_path, **{name: {field: "x"}}), ON_ONE_THREAD)
    assert str(caught.value) == (
        f"{name}.{field} is 'x', but the package {name!r} is not installed. Run pip install \"onward[{name}]\", or "
        f"remove the section {name}."
    )
