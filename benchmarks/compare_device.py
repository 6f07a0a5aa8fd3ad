"""A device bundle with the Python client, in a process without torch: `benchmarks.device_peers` starts it.

`write FOLDER` writes the bundle, in a process of its own, which has torch; `onward device FOLDER` trains with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare_protocol import profile_if_asked, reset_peak, resident_bytes, say, serve

ROOT = Path(__file__).parent.parent


def write(folder: Path, task: dict[str, Any]) -> None:
    """The bundle of the network that `compare_contestants.prepare` wrote, with its batches' sizes."""
    import yaml

    from benchmarks.compare_contestants import Task, onward_fields
    from onward.device.bundle import write_bundle

    fields = onward_fields(Task(**task), folder)
    fields["paths"] = {"model_path": "model.onnx"}
    fields["training"]["num_train_steps"] = 1000
    (folder / "run.yaml").write_text(yaml.safe_dump(fields))
    write_bundle(folder / "run.yaml", folder / "bundle", notify=lambda line: print(line, file=sys.stderr))


def make_step(folder: Path, task: dict[str, Any]) -> Any:
    """A step as an application takes it, checks of its batch included."""
    sys.path.append(str(ROOT / "clients" / "python"))
    from onward_device import Trainer, session_options

    options = session_options(task["threads"])
    profile_if_asked(options, folder, "device")
    trainer = Trainer.load(folder / "bundle", options=options)
    stored = np.load(folder / "batches.npz")
    batches: dict[str, dict[str, Any]] = {}
    for key in stored:
        number, _, name = key.partition("/")
        batches.setdefault(number, {})[name] = stored[key]
    return lambda number: trainer.train_step(batches[str(number % len(batches))])


def main() -> None:
    way, folder = sys.argv[1], Path(sys.argv[2])
    task = json.loads((folder / "task.json").read_text())
    if way == "write":
        write(folder, task)
        return
    written = subprocess.run([sys.executable, "-m", "benchmarks.compare_device", "write", str(folder)])
    baseline = resident_bytes("VmRSS")
    reset_peak()
    try:
        written.check_returncode()
        step = make_step(folder, task)
    except Exception as error:
        said = str(error).strip().splitlines()
        say({"failure": f"{type(error).__name__}: {said[0][:200] if said else ''}"})
        raise

    def memory(one: Any) -> int:
        one()
        return 0  # its tensors are the runtime's; what is resident tells

    serve(step, memory, baseline)


if __name__ == "__main__":
    main()
