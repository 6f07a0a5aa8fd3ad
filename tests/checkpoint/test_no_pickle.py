"""No pickle: neither in what is written, nor in reading it, nor in our source."""

from __future__ import annotations

import ast
import io
import pickle
import pickletools
from pathlib import Path

import pytest
import torch

import onward.checkpoint
from onward.checkpoint.reading import read_new_tensors, read_record, read_tensors
from onward.checkpoint.writing import CheckpointWriter
from tests.checkpoint.contents import RECORD, every_kind, same, zeros_like

SOURCE = Path(onward.checkpoint.__file__).parent


def test_saving_and_loading_call_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way into pickle and torch.load raises, also inside torch; a round trip still works."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler", "_Pickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    with pytest.raises(AssertionError):
        pickle.load(io.BytesIO())
    tensors = every_kind()
    for blocking in (True, False):
        with CheckpointWriter(tmp_path, 1, blocking=blocking) as writer:
            path = writer.save(1, tensors, RECORD)
        into = zeros_like(tensors)
        read_tensors(path, into)
        assert all(same(tensors[name], into[name]) for name in tensors)
        assert read_record(path) == RECORD
        assert set(read_new_tensors(path)) == set(tensors)


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1) as writer:
        path = writer.save(1, every_kind(), RECORD)
    files = sorted(path.iterdir())
    assert [file.name for file in files] == ["manifest.json", "rank-00000.safetensors"]
    for file in files:
        with pytest.raises(ValueError, match=r".*"):
            list(pickletools.genops(file.read_bytes()))


def test_the_source_imports_no_pickle_and_calls_no_torch_load() -> None:
    """By the syntax tree of every file in the folder."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            else:
                continue
            used = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "torch.load", "torch.save"}
            assert used.isdisjoint(names), f"{path}:{node.lineno}"
