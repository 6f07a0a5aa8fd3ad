"""Ctrl-C in `onward.fit`, sent to its own process: what was trained so far is returned, saved, and resumed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import onnxruntime
import pytest

from tests.forked_commands import ForkedProcess
from tests.mlp import build_mlp, data, save_mlp

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, sys
import onward
from tests.mlp import data

class Speaks(onward.Callback):
    def on_update(self, report):
        if report.update == 5:
            print("training", flush=True)

folder, steps, keeps = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
train = data(40)
result = onward.fit(
    f"{folder}/mlp.onnx", (train["x"], train["label"]), loss="cross_entropy", batch_size=8, steps=steps, progress=False,
    callbacks=[Speaks()], environment=onward.Environment(execution_provider="CPU", threads=1),
    output_dir=f"{folder}/out", checkpoints_dir=f"{folder}/checkpoints" if keeps else None,
    validation_data=(train["x"], train["label"]), parameters={"training": {"evaluation_period": 1000000}},
)
result.export(f"{folder}/exported.onnx")
print(json.dumps({
    "interrupted": result.is_interrupted, "stopped": result.summary.stopped, "updates": result.summary.updates,
    "held": result.held_update, "loss": result.history.loss[-1], "notes": result.history.messages,
}))
"""


def start(folder: Path, steps: int, keeps: bool) -> ForkedProcess:
    command = ["python", "-c", SCRIPT, str(folder), str(steps), json.dumps(keeps)]
    with (folder / "stderr").open("w") as errors:
        return ForkedProcess(command, ROOT, errors=errors.fileno())


def interrupted(folder: Path, keeps: bool, *signals: signal.Signals) -> tuple[int, str, str]:
    """Trains until the signals come; exit code and what was printed after."""
    with start(folder, 1_000_000, keeps) as process:
        assert process.stdout.readline() == "training\n"
        for one in signals:
            process.send_signal(one)
        code, out = process.finish()
    return code, out, (folder / "stderr").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send to one process")
@pytest.mark.parametrize("keeps", [False, True])
def test_ctrl_c_returns_what_is_trained_so_far(keeps: bool, tmp_path: Path) -> None:
    """The model is written, the record says interrupted, and with a folder of checkpoints a second call resumes."""
    save_mlp(tmp_path)
    code, out, err = interrupted(tmp_path, keeps, signal.SIGINT)
    assert code == 0, err
    said = json.loads(out)
    assert said["interrupted"] is True
    assert said["stopped"] == "interrupted by Ctrl-C"
    assert said["held"] == said["updates"] >= 5
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "interrupted"
    files = [tmp_path / "out" / "mlp_trained.onnx", tmp_path / "exported.onnx"]
    first, second = (onnxruntime.InferenceSession(file).run(None, {"x": data(4)["x"]})[0] for file in files)
    assert (first == second).all()
    assert (first != _untrained()).any()
    if not keeps:
        return
    with start(tmp_path, said["updates"] + 7, True) as process:
        code, out = process.finish()
    assert code == 0, (tmp_path / "stderr").read_text()
    again = json.loads(out.splitlines()[-1])
    assert again["interrupted"] is False
    assert again["held"] == said["updates"] + 7
    assert any(f"round 0, step {said['updates']}, {said['updates']} updates done" in note for note in again["notes"])


def _untrained() -> object:
    return onnxruntime.InferenceSession(build_mlp().SerializeToString()).run(None, {"x": data(4)["x"]})[0]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send to one process")
def test_sigterm_saves_and_raises(tmp_path: Path) -> None:
    """Whoever sends it wants the process to end; a loop over fits must not continue."""
    save_mlp(tmp_path)
    code, out, err = interrupted(tmp_path, True, signal.SIGTERM)
    assert code != 0
    assert out == ""
    assert "Interrupted: stopped by SIGTERM after step" in err
    assert "saved as" in err
    assert list((tmp_path / "checkpoints").iterdir())
