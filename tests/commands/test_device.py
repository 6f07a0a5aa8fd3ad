"""`onward device` and `onward export --device-state`: arguments that do not belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.cli import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["device", "run.yaml"], "-o is missing; pass -o DIR, the folder of the bundle."),
        (["device", "average", "a"], "-o is missing; pass -o STATE, where the average goes."),
        (["device", "a.yaml", "b.yaml", "-o", "c"], "onward device takes one RUN.yaml; 2 files are given."),
        (
            ["device", "average", "a", "-o", "c", "--weights", "1,x"],
            "--weights is '1,x'; expected numbers like 100,250",
        ),
        (["device", "average", "a", "b", "-o", "c"], "the device state a cannot be read"),
        (
            ["export", "m.onnx", "--device-state", "s"],
            "--device-state takes one MODEL and needs -o FILE, without --chec",
        ),
    ],
)
def test_options_that_do_not_belong_together(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) in (1, 2)
    assert words in capsys.readouterr().err


def test_a_folder_that_holds_something_else_stays(tmp_path: Path) -> None:
    from onward.device.bundle_files import save_bundle
    from onward.device.layout import DeviceGraphs
    from onward.errors import StorageError

    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_text("mine")
    with pytest.raises(
        StorageError, match=r"photos exists and holds no device bundle\. Choose another folder, or remove"
    ):
        save_bundle(DeviceGraphs(models={}, state=()), tmp_path / "photos")
    assert (tmp_path / "photos" / "one.png").read_text() == "mine"


def test_a_file_that_is_no_state_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s").write_bytes(b"no state at all")
    assert main(["device", "average", str(tmp_path / "s"), "t", "-o", str(tmp_path / "m")]) == 2
    assert "is no safetensors file. Pass a file that a client saved." in capsys.readouterr().err
