"""Only regular files of bounded size are opened, and names in files do not lead out of their folder."""

from __future__ import annotations

import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from onward.untrusted_files import RefusedFile, open_regular, parse_json, path_inside, read_bytes, read_text

ESCAPES = (
    "../secret", "a/../../secret", "/etc/hostname", "", ".", "..", "a\0b", "a\nb", "link", "linked/secret", "\udfff",
    "x" * 5000, 7, None, ["a"], b"a",
)  # fmt: skip
"""Names that a forged file may hold; `link` and `linked` lead out of the folder."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "file").write_text("content\r\nmore")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "linked").symlink_to(tmp_path)
    (inside / "within").symlink_to("file")
    return inside


@pytest.mark.parametrize("name", ESCAPES, ids=lambda name: repr(name)[:20])
def test_names_that_lead_out_of_the_folder(folder: Path, name: object) -> None:
    with pytest.raises(RefusedFile, match=r"is not the name of a file|is outside of the folder"):
        path_inside(folder, name)


@pytest.mark.parametrize("name", ["file", "within", "none", "a/b", "a/../file", "Gewicht ü"])
def test_names_that_stay_in_it(folder: Path, name: str) -> None:
    assert path_inside(folder, name) == folder / name


def test_a_folder_that_is_itself_behind_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(folder)
    assert read_text(path_inside(tmp_path / "other", "within")) == "content\nmore"


def test_a_small_file_takes_no_memory_for_the_largest_one(folder: Path) -> None:
    tracemalloc.start()
    assert read_bytes(folder / "file", 1 << 30) == b"content\r\nmore"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    (folder / "large").write_bytes(b"x" * (3 << 20))
    assert len(read_bytes(folder / "large")) == 3 << 20
    assert read_bytes("/proc/self/comm")  # of 0 bytes, as the system says


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    """None of these waits, not even the pipe that nobody writes to."""
    path = tmp_path / "x"
    words = {
        "pipe": r"is a pipe \(FIFO\)",
        "folder": "is a folder",
        "device": "is a device",
        "socket": "No such device",
    }[kind]
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    with pytest.raises(OSError, match=words):
        open_regular(path)


def test_sizes_are_bounded_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RefusedFile, match=r"has 1,099,511,627,776 bytes; at most 1,073,741,824 are expected of it"):
        read_bytes(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[" * 200 + "]" * 200], ids=["list", "object", "closed"]
)
def test_deep_json(text: str) -> None:
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        parse_json(text)


def test_json_of_ordinary_depth() -> None:
    assert parse_json('{"a": [1, {"b": []}]}') == {"a": [1, {"b": []}]}
    with pytest.raises(ValueError, match="digits"):
        parse_json("1" * 10_000)
