"""Temporary files of killed processes are removed by the next one; those of living processes and strangers stay."""

from __future__ import annotations

import os
import random
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onward.exclusive.process_mark import ProcessMark
from onward.exclusive.temporary import remove_abandoned, temporary_folder, temporary_path

HOLD = """
import sys, time
from pathlib import Path
from onward.exclusive.temporary import temporary_folder
with temporary_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_bytes(b"x" * 100)
    print(folder.name, flush=True)
    time.sleep(60)
"""


def begin(path: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that writes into a temporary folder next to `path`, and the folder's name."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        return process, output.readline().strip()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    process, name = begin(tmp_path / "model.onnx")
    try:
        assert remove_abandoned(tmp_path) == [], "a living process writes there"
        assert (tmp_path / name / "half").is_file()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / name / "half").is_file(), "SIGKILL leaves it"
    with temporary_folder(tmp_path / "other.onnx") as folder:
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert list(tmp_path.iterdir()) == []


def test_a_process_number_that_was_given_away_is_no_sign_of_life(tmp_path: Path) -> None:
    own = ProcessMark.own()
    before = ProcessMark(own.machine, own.pid, own.started - 1)
    assert own.is_alive is True
    assert before.is_alive is False
    assert ProcessMark("0" * 16, own.pid, own.started).is_alive is None


def test_another_machine_is_given_a_day(tmp_path: Path) -> None:
    name = f".m.onnx.onward-tmp-{ProcessMark('0123456789abcdef', 1, 2)}-00000000"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "half").write_text("x")
    assert remove_abandoned(tmp_path) == []
    old = time.time() - 25 * 3600
    os.utime(folder, (old, old))
    assert remove_abandoned(tmp_path) == [], "a file in it was written to"
    os.utime(folder / "half", (old, old))
    os.utime(folder, (old, old))
    assert remove_abandoned(tmp_path) == [folder]


@pytest.mark.parametrize("seed", range(20))
def test_names_of_strangers_are_never_removed(tmp_path: Path, seed: int) -> None:
    """A generator of names: whatever does not hold the mark of an ended process stays."""
    generator = random.Random(seed)
    ours = temporary_path(tmp_path / "x").name
    letters = string.ascii_letters + string.digits + ".-_~ "
    made = set()
    for _ in range(30):
        begin = generator.randrange(len(ours))
        cut = ours[:begin] + "".join(generator.choices(letters, k=generator.randrange(1, 5))) + ours[begin + 3 :]
        name = generator.choice([cut, f".tmp-{cut}", ours.replace("-tmp-", "-"), cut[1:], f"{cut}.partial"])
        if name not in (".", ".."):
            (tmp_path / name).write_text("mine")
            made.add(name)
    remove_abandoned(tmp_path)
    own = ProcessMark.own()
    left = {path.name for path in tmp_path.iterdir()}
    for name in made - left:  # a cut that happens to be the mark of a process that is none
        assert f"-tmp-{own.machine}-" in name
        assert f"-{own.pid}-{own.started}-" not in name
