"""Files of strangers in the folder of checkpoints stay; leftovers go."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from onward.checkpoint.disk import prepare_directory
from tests.checkpoint.trained_runs import trained


@pytest.mark.parametrize("seed", range(10))
def test_files_of_strangers_stay(tmp_path: Path, seed: int) -> None:
    """A generator of names that look like onward's temporary ones, and are not."""
    generator = np.random.default_rng(seed)
    parts = [".tmp-", "onward-", "removed-", ".replaced-", "checkpoint-", "00000012", "shared-", "x", "-", ".pt", "7"]
    ours = {
        ".tmp-onward-checkpoint-00000012",
        ".tmp-onward-removed-checkpoint-00000012",
        ".replaced-checkpoint-00000012",
    }
    made = set()
    for _ in range(60):
        name = "".join(generator.choice(parts, int(generator.integers(1, 6))))
        if name not in ours and not name.endswith("checkpoint-0000001200000012"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "thesis.txt").write_text("mine")
            made.add(name)
    for name in ours - {".replaced-checkpoint-00000012"}:
        (tmp_path / name).mkdir()
    prepare_directory(tmp_path, None)
    assert {path.name for path in tmp_path.iterdir()} == made
    assert all((tmp_path / name / "thesis.txt").is_file() for name in made)


def test_leftovers_of_earlier_versions_are_removed_if_nothing_else_is_in_them(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    shutil.copytree(folder / "checkpoint-00000008", folder / ".tmp-checkpoint-00000009")
    shutil.copytree(folder / "checkpoint-00000008", folder / ".tmp-checkpoint-00000010")
    (folder / ".tmp-checkpoint-00000010" / "notes.txt").write_text("mine")
    prepare_directory(folder, None)
    assert sorted(path.name for path in folder.glob(".tmp*")) == [".tmp-checkpoint-00000010"]
