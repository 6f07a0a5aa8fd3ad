"""Files by URL: fsspec's `memory://` stands for an object store, `file://` for one that several processes see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from onward.remote.files import (
    download,
    is_file,
    is_folder,
    list_folder,
    open_binary,
    read_text,
    remove,
    shown,
    upload,
    url_of,
)


@pytest.fixture
def store() -> Iterator[Any]:
    """fsspec's file system in memory, empty."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/a/b.pb", "s3://bucket/a/b.pb"),
        ("gs://bucket", "gs://bucket"),
        ("memory://x/y", "memory://x/y"),
        ("file:///folder/x", "file:///folder/x"),
        ("simplecache::s3://bucket/a", "simplecache::s3://bucket/a"),
        ("data/train", None),
        ("/data/train", None),
        ("../a:b/c", None),
        ("C:/data", None),
        ("a:b", None),
    ],
)
def test_which_paths_are_urls(text: str, url: str | None) -> None:
    assert url_of(text) == url
    assert url_of(Path(text)) == url  # pathlib keeps one of the slashes
    assert shown(Path(text)) == text
    if url is not None:
        assert url_of(Path(text) / "more") == f"{url}/more"


def test_a_folder_is_listed_alike_here_and_there(store: Any, tmp_path: Path) -> None:
    for name, content in (("b.pb", b"12"), ("a.txt", b"abc"), ("inside/c.pb", b"1")):
        store.pipe_file(f"/bucket/data/{name}", content)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    there = Path("memory://bucket/data")
    assert list_folder(there) == list_folder(tmp_path)
    assert [(one.name, one.is_file, one.size_bytes) for one in list_folder(there)] == [
        ("a.txt", True, 3),
        ("b.pb", True, 2),
        ("inside", False, 0),
    ]
    for folder in (there, tmp_path):
        assert is_folder(folder)
        assert not is_folder(folder / "none")
        assert is_file(folder / "a.txt")
        assert not is_file(folder / "inside")
        assert read_text(folder / "a.txt") == "abc"
        with pytest.raises(FileNotFoundError):
            list_folder(folder / "none")
        with pytest.raises(NotADirectoryError):
            list_folder(folder / "a.txt")


def test_reading_gives_a_real_file(store: Any) -> None:
    store.pipe_file("/bucket/a.bin", b"0123456789")
    with open_binary(Path("memory://bucket/a.bin")) as file:
        assert file.fileno() > 0
        file.seek(4)
        assert file.read(3) == b"456"
    with pytest.raises(FileNotFoundError), open_binary(Path("memory://bucket/none")):
        pass


def test_a_copy_is_complete_or_not_there(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe_file("/bucket/a.bin", b"0123456789")
    download(Path("memory://bucket/a.bin"), tmp_path / "new" / "a.bin")
    assert (tmp_path / "new" / "a.bin").read_bytes() == b"0123456789"

    def broken(source: str, target: str) -> None:
        Path(target).write_bytes(b"0123")
        raise ConnectionResetError("the connection was closed")

    monkeypatch.setattr(store, "get_file", broken)
    with pytest.raises(OSError, match="the connection was closed"):
        download(Path("memory://bucket/a.bin"), tmp_path / "new" / "b.bin")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.bin"]


def test_there_and_away_again(store: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    upload(tmp_path / "a", Path("memory://bucket/deep/er/a"))
    assert read_text(Path("memory://bucket/deep/er/a")) == "text"
    remove(Path("memory://bucket/deep"))
    remove(Path("memory://bucket/deep"))
    assert not is_file(Path("memory://bucket/deep/er/a"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (
            "nonsense://bucket/a",
            "nonsense:// is not a protocol that fsspec supports; expected file, gs, https, memory, s3 and others",
        ),
        ("gs://bucket/a", "gs:// needs another package: pip install gcsfs"),
    ],
)
def test_protocols_that_are_not_there(url: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if url.startswith("gs"):
        monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(OSError, match=r"://") as refused:
        read_text(Path(url))
    assert refused.value.strerror == words
    assert refused.value.filename == url


def test_errors_of_clients_become_os_errors(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(store, "ls", refuse)
    with pytest.raises(OSError, match="no credentials") as refused:
        list_folder(Path("memory://bucket"))
    assert refused.value.strerror == "RuntimeError: no credentials"
