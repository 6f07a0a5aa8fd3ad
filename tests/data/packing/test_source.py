"""Sources of packing: what is missing is named."""

import pytest

from onward.data.packing import source as source_module
from onward.errors import UserError
from tests.data.packing.texts import pack_text


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(source_module.importlib, "import_module", missing)
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(UserError, match=r"needs the Python package 'tokenizers', .* pip install onward\[pack\]"):
        pack_text(tmp_path / "a.txt", tmp_path / "out", tokenizer="bpe")
    pack_text(tmp_path / "a.txt", tmp_path / "out", sequence_length=2)
