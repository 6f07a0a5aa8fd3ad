"""`run.json` of a folder, as others read it: what cannot be read is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.report.run_folder import RECORD_NAME, read_record


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b'{"a": "\xc3\xa4"}', {"a": "ä"}), (b"{}", {}), (b"[1]", None), (b"", None), (b'{"a"', None), (b"\xff{}", None)],
)
def test_what_is_there(content: bytes, expected: dict[str, str] | None, tmp_path: Path) -> None:
    (tmp_path / RECORD_NAME).write_bytes(content)
    assert read_record(tmp_path) == expected


def test_other_files_and_none(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"b": 1}')
    assert read_record(tmp_path, "other.json") == {"b": 1}
    assert read_record(tmp_path) is None
    (tmp_path / RECORD_NAME).mkdir()
    assert read_record(tmp_path) is None
    assert read_record(tmp_path / "none") is None
