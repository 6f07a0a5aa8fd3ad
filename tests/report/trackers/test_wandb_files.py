"""The reader of W&B's files, on which the tests of the tracker rely: records across blocks, files not yet closed."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from tests.report.trackers.wandb_files import BLOCK, COMPLETE, FIRST, HEADER, LAST, MIDDLE, read_run, records

FILE_START = b":W&B" + bytes(3)


def written(contents: list[bytes]) -> bytes:
    """A file as the format says: no part crosses a block's end, and no header starts less than 7 bytes before it."""
    file = bytearray(FILE_START)
    for content in contents:
        is_first, rest = True, content
        while is_first or rest:
            left = BLOCK - len(file) % BLOCK
            if left < HEADER:
                file += bytes(left)
                continue
            part, rest = rest[: left - HEADER], rest[left - HEADER :]
            kind = (LAST, MIDDLE, COMPLETE, FIRST)[2 * is_first + bool(rest)]
            checked = bytes([kind]) + part
            file += struct.pack("<IH", zlib.crc32(checked), len(part)) + checked
            is_first = False
    return bytes(file)


@pytest.mark.parametrize("blocks", [1, 3])
def test_records_on_both_sides_of_a_blocks_end(blocks: int) -> None:
    for short in range(-20, 21):
        first = bytes(index % 251 for index in range(blocks * BLOCK - len(FILE_START) - HEADER * blocks - short))
        contents = [first, b"second", b"x" * (BLOCK + short), b"", b"last"]
        assert list(records(written(contents))) == contents, short


def test_a_file_that_is_cut_off_or_damaged_is_no_shorter_run() -> None:
    file = written([b"first", b"y" * BLOCK])
    for end in (*range(len(FILE_START) + 1, len(FILE_START) + 12), BLOCK - 1, BLOCK, BLOCK + 3, len(file) - 1):
        with pytest.raises((AssertionError, struct.error)):
            list(records(file[:end]))
    for place in (8, 12, 20, BLOCK + 2, BLOCK + 9):
        damaged = file[:place] + bytes([file[place] ^ 1]) + file[place + 1 :]
        with pytest.raises(AssertionError):
            list(records(damaged))


def test_a_file_of_which_only_the_start_is_written_is_not_read_as_a_run(tmp_path: Path) -> None:
    """Which W&B's service leaves until it closes the file: a test once compared its empty id."""
    pytest.importorskip("wandb", reason="needs wandb")
    path = tmp_path / "run-x.wandb"
    path.write_bytes(FILE_START)
    with pytest.raises(AssertionError, match="has not closed it"):
        read_run(path)


def test_a_run_with_records_longer_than_blocks(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    config = {"long": "abc" * BLOCK, "short": 1, "also": "d" * (BLOCK - 300)}
    settings = wandb.Settings(silent=True, console="off")
    wandb.init(project="p", mode="offline", dir=tmp_path, config=config, settings=settings).finish()
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    read = read_run(path)
    assert {name: read.config[name] for name in config} == config
    assert read.exit_code == 0
