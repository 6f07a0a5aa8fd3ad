"""What commands write: two at once never mix, a failure leaves the file that was there, nothing is left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.cli import main
from onward.data.packing import packer
from onward.data.packing.packer import pack
from onward.errors import DataError
from onward.exclusive import temporary
from tests.commands.test_limits import trained

__all__ = ["trained"]

COMMANDS = {
    "create": ("create mnist -o made.onnx", "made.onnx"),
    "init": ("init mlp.onnx train -o made.yaml --no-trial --force", "made.yaml"),
    "report": ("report out -o made.html --no-plan", "made.html"),
    "lr-find": ("lr-find run.yaml --image made.svg --steps 10", "made.svg"),
    "plan, a picture": ("plan run.yaml --image made.png", "made.png"),
    "plan, a model": ("plan run.yaml --write made_plan.onnx", "made_plan.onnx"),
    "export": ("export mlp.onnx --checkpoint out/checkpoints -o made_model.onnx", "made_model.onnx"),
    "export, graphs": ("export mlp.onnx --run run.yaml --training-graph made_graph.onnx", "made_graph.onnx"),
}
"""Command line, and the file that it writes."""

HOLD = """
import sys
from pathlib import Path
from onward.exclusive.lock import lock_outputs
locks = lock_outputs([Path(name) for name in sys.argv[1:] if "." not in name],
                     [Path(name) for name in sys.argv[1:] if "." in name])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def held(trained: Path) -> Iterator[Path]:
    """The same folder, another process holding the locks of all files; each has a content."""
    names = [name for _, name in COMMANDS.values()]
    for name in names:
        (trained / name).write_text("as it was")
    (trained / "shards").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *names, "shards"], cwd=trained, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield trained
    process.communicate()


def _hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*") if "lock" not in path.name)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_another_process_writes(
    command: str, held: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(held)
    words, name = COMMANDS[command]
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert f"{name} is in use: python " in said
    assert ", since 20" in said
    assert (held / name).read_text() == "as it was"
    assert _hidden(held) == []


def test_a_folder_that_another_process_packs_into(
    held: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(held)
    (held / "table.csv").write_text("a,b\n1,2\n3,4\n")
    assert main(["pack", "table.csv", "shards"]) == 2
    assert "shards is in use: python " in capsys.readouterr().err
    assert [path.name for path in (held / "shards").iterdir()] == [".onward-lock"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_failure_at_the_end_leaves_the_file_that_was_there(
    command: str, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(trained)
    words, name = COMMANDS[command]
    words, name = words.replace("made", "other"), name.replace("made", "other")
    (trained / name).write_text("as it was")
    replace = os.replace

    def refuse(source: str, target: str) -> None:
        if Path(target).name == name:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    assert main(words.split()) == 2
    assert name in capsys.readouterr().err
    assert (trained / name).read_text() == "as it was"
    assert _hidden(trained) == []
    monkeypatch.undo()
    monkeypatch.chdir(trained)
    assert main(words.split()) == 0
    assert (trained / name).read_bytes() != b"as it was"


def test_shards_that_another_process_packed_meanwhile_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was not there when the command began, and took the lock first."""
    (tmp_path / "table.csv").write_text("a,b\n1,2\n3,4\n")
    look, looks = packer._open, []

    def slow(*arguments):
        if not looks:
            looks.append(True)
            pack(tmp_path / "table.csv", tmp_path / "shards")
        return look(*arguments)

    monkeypatch.setattr(packer, "_open", slow)
    with pytest.raises(DataError, match="already holds 2 files of packed data"):
        pack(tmp_path / "table.csv", tmp_path / "shards")
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == ["pack.json", "shard-000000.pb"]


def test_init_does_not_overwrite_what_another_one_wrote_meanwhile(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from onward.commands import initialization

    monkeypatch.chdir(trained)
    check, checks = initialization._check_target, []

    def checked(target: Path, is_forced: bool) -> None:
        check(target, is_forced)
        if not checks:
            target.write_text("of another one")
        checks.append(True)

    monkeypatch.setattr(initialization, "_check_target", checked)
    assert main(["init", "mlp.onnx", "train", "-o", "both.yaml", "--no-trial"]) == 2
    assert "already exists. Pass --force to overwrite it" in capsys.readouterr().err
    assert (trained / "both.yaml").read_text() == "of another one"


def test_replacing_removes_what_killed_processes_left(tmp_path: Path):
    code = (
        "import os, pathlib\nfrom onward.exclusive.temporary import replacing\n"
        "with replacing(pathlib.Path('a')) as one:\n    one.write_text('half')\n    os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert len(list(tmp_path.iterdir())) == 1
    with temporary.replacing(tmp_path / "b") as unfinished:
        unfinished.write_text("all")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
