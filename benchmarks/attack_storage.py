"""Attacks on a run by its storage and its clocks: operations that fail, files that cannot grow, folders that vanish,
time that stands still or jumps, and checkpoints whose state was forged. Each case trains a small network here.

A case is held when the run ends with exit code 0 and its model, or with 2 or 3 and a message, within `LONGEST_SECONDS`
and without a traceback, and when the same command succeeds afterwards, once the fault is gone.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.checkpoint.test_forged import forge
from tests.faulty_storage import OPERATIONS, Fault, faulty_storage
from tests.mlp import CROSS_ENTROPY, data, save_mlp, write_shards

from benchmarks.attack_row import Result, Row
from onward.cli import main
from onward.report.watching import Watchers
from onward.retries import Patience
from onward.untrusted_files import sha256_of

LONGEST_SECONDS = 60.0
ALL_FROM_SECONDS = 60.0
"""With so many seconds for a row (the default of the benchmark) all its cases are tried, in minutes; else as many as
the time allows, drawn by the seed."""

STEPS = 6
DAY_SECONDS = 86_400.0
NUMBERS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOENT)
PLACES = ("checkpoints", "logs", "out", "train", "")
EVER = 10**9

Attack = Callable[[Path, contextlib.ExitStack], None]
"""Prepares the fault; what it enters into the stack is undone after the run."""


def _workplace(folder: Path) -> Path:
    """A folder with model, data and RUN.yaml, none of it trained."""
    folder.mkdir()
    save_mlp(folder)
    write_shards(folder / "train", data(24))
    write_shards(folder / "test", data(8, seed=1))
    run = {
        "paths": {"model_path": "mlp.onnx", "train_data_dir": "train", "test_data_dir": "test", "output_dir": "out"},
        "loss": dict(CROSS_ENTROPY),
        "training": {"batch_size": 4, "num_train_steps": STEPS, "display_loss_steps": 1, "evaluation_period": 3},
        "learning_rate": {"initial_lr": 0.1},
        "checkpoint": {"checkpoints_dir": "checkpoints", "checkpoint_period": 2},
        "tensorboard": {"log_dir": "logs"},
        "machine": {"execution_provider": "CPU", "threads": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder


class Hangs(BaseException):
    """A run that takes too long; no handler of errors of the product may take it for its own."""


def _train(folder: Path, more: Iterable[str] = ()) -> tuple[int | str, str]:
    """The exit code of a run, or what it raised, and what it said."""

    def ring(*_: object) -> None:
        raise Hangs

    said, before = io.StringIO(), signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            return main(["train", str(folder / "run.yaml"), "--quiet", *more]), said.getvalue()
    except Hangs:
        return f"hangs for {LONGEST_SECONDS:.0f} s", said.getvalue()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}", said.getvalue()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _wrong(folder: Path, attack: Attack, again: bool) -> str:
    """ "" where a case is held."""
    with contextlib.ExitStack() as stack:
        attack(folder, stack)
        code, said = _train(folder)
    model = folder / "out" / "mlp_trained.onnx"
    if code not in (0, 2, 3):
        return f"ended with {code} {said[-300:]!r}"
    if "Traceback" in said:
        return f"prints a traceback: {said[-300:]!r}"
    if code and not said.strip():
        return f"ended with {code} and no message"
    if code == 0 and not model.is_file():
        return "ended with 0 and no model"
    if again:
        code, said = _train(folder)
        if code != 0 or not model.is_file():
            return f"the fault is gone, and the same command ends with {code} {said[-300:]!r}"
    return ""


def _row(cases: Callable[[], list[tuple[str, Attack]]], again: bool = True) -> Callable[[float, int], Result]:
    def run(seconds: float, seed: int) -> Result:
        asked = cases()
        random.Random(seed).shuffle(asked)
        end, tried, lost = time.monotonic() + seconds, 0, list[str]()
        with tempfile.TemporaryDirectory() as folder:
            template = _workplace(Path(folder) / "template")
            for name, attack in asked:
                if tried > 1 and seconds < ALL_FROM_SECONDS and time.monotonic() > end:
                    break
                tried += 1
                place = Path(shutil.copytree(template, Path(folder) / "run"))
                wrong = _wrong(place, attack, again)
                lost += [f"{name}: {wrong}"] if wrong else []
                shutil.rmtree(place)
        return Result(tried, tried - len(lost), tuple(lost))

    return run


# ------------------------------------------------------------------------------------------------- operations that fail


@dataclass
class _Later(Fault):
    """A fault within a folder that begins after so many operations of its kind."""

    skip: int = 0
    within: str = ""

    def strike(self, operation: str, path: object) -> None:
        if self.within not in str(path):
            return
        if operation == self.operation and self.match in str(path) and self.skip > 0:
            self.skip -= 1
            return
        super().strike(operation, path)


def _failing(fault: _Later, frozen: bool, folder: Path, stack: contextlib.ExitStack) -> None:
    patched = stack.enter_context(pytest.MonkeyPatch.context())
    injected = stack.enter_context(faulty_storage(patched, Patience(0.3, 0.001, 0.01, 5.0)))
    injected.faults.append(replace(fault, within=str(folder)))
    if frozen:
        _freeze(("monotonic",), folder, stack)


def _failures() -> list[tuple[str, Attack]]:
    cases: list[tuple[str, Attack]] = []
    for operation in OPERATIONS:
        for number in NUMBERS:
            for place in PLACES:
                for skip, times in ((0, 1), (0, EVER), (5, EVER)):
                    fault = _Later(operation, place, times, number=number, skip=skip)
                    name = f"{operation} {errno.errorcode[number]} in {place or 'any'} after {skip}, {times} times"
                    cases.append((name, partial(_failing, fault, False)))
        stall = _Later(operation, "checkpoints", 1, seconds=0.2, skip=1)
        cases.append((f"{operation} stalls", partial(_failing, stall, False)))
        frozen = _Later(operation, "checkpoints", EVER, number=errno.EIO, skip=2)
        cases.append((f"{operation} EIO for ever, monotonic clock frozen", partial(_failing, frozen, True)))
    return cases


def _limited(size_bytes: int, folder: Path, stack: contextlib.ExitStack) -> None:
    """No file of the process may grow beyond so many bytes, by order of the kernel: also code that is not Python's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))


def _limits() -> list[tuple[str, Attack]]:
    sizes = (0, 1, 50, 200, 600, 1000, 2000, 4000, 8000, 20_000)
    return [(f"files of at most {size} bytes", partial(_limited, size)) for size in sizes]


# ------------------------------------------------------------------------------------------------ folders that vanish


def _vanishing(names: tuple[str, ...], step: int, folder: Path, stack: contextlib.ExitStack) -> None:
    forward = Watchers.on_step_done

    def on_step_done(self: Watchers, done: Any, state: Any) -> None:
        if done.step == step:
            for name in names:
                shutil.rmtree(folder / name, ignore_errors=True)
        forward(self, done, state)

    stack.enter_context(pytest.MonkeyPatch.context()).setattr(Watchers, "on_step_done", on_step_done)


def _folders() -> list[tuple[str, Attack]]:
    groups = [(name,) for name in ("checkpoints", "logs", "out")] + [("checkpoints", "logs", "out")]
    return [
        (f"{' and '.join(names)} removed after step {step}", partial(_vanishing, names, step))
        for names in groups
        for step in (1, 2, 4, STEPS)
    ]


# ------------------------------------------------------------------------------------------------------------- clocks

CLOCKS = ("time", "monotonic", "perf_counter")
_real_clocks = {name: getattr(time, name) for name in CLOCKS}


def _freeze(names: Iterable[str], folder: Path, stack: contextlib.ExitStack) -> None:
    patched = stack.enter_context(pytest.MonkeyPatch.context())
    for name in names:
        now = _real_clocks[name]()
        patched.setattr(time, name, lambda now=now: now)
        if f"{name}_ns" in vars(time):
            patched.setattr(time, f"{name}_ns", lambda now=now: int(now * 1e9))


def _jump(name: str, after: int, seconds: float, folder: Path, stack: contextlib.ExitStack) -> None:
    calls = [0]

    def clock() -> float:
        calls[0] += 1
        return float(_real_clocks[name]() + (seconds if calls[0] > after else 0.0))

    stack.enter_context(pytest.MonkeyPatch.context()).setattr(time, name, clock)


def _swing(folder: Path, stack: contextlib.ExitStack) -> None:
    """Every look at the wall clock gives another day."""
    draw = random.Random(0)
    swinging = stack.enter_context(pytest.MonkeyPatch.context())
    swinging.setattr(time, "time", lambda: _real_clocks["time"]() + draw.uniform(-30, 30) * DAY_SECONDS)


def _clocks() -> list[tuple[str, Attack]]:
    cases: list[tuple[str, Attack]] = [(f"{name} frozen", partial(_freeze, (name,))) for name in CLOCKS]
    cases += [("all clocks frozen", partial(_freeze, CLOCKS)), ("the wall clock swings", _swing)]
    cases += [
        (f"{name} jumps by {days:g} days after {after} calls", partial(_jump, name, after, days * DAY_SECONDS))
        for name in CLOCKS
        for days in (-400, -1, 1, 400)
        for after in (0, 10, 60)
        if name == "time" or days > 0  # the others never go back
    ]
    return cases


# ------------------------------------------------------------------------------------------------- forged checkpoints


def _forged(change: Callable[[dict[str, Any]], None], folder: Path, stack: contextlib.ExitStack) -> None:
    assert _train(folder)[0] == 0
    (folder / "out" / "mlp_trained.onnx").unlink()
    for path in (folder / "checkpoints").glob("checkpoint-*"):
        if path.name == f"checkpoint-{STEPS:08}":
            shutil.rmtree(path)
        else:
            forge(path, change)


def _forged_tensor(kind: str, content: str, folder: Path, stack: contextlib.ExitStack) -> None:
    """The bytes of one tensor, the checksum of its file right."""
    _forged(lambda _: None, folder, stack)
    for path in (folder / "checkpoints").glob("checkpoint-*"):
        for file in path.glob("*.safetensors"):
            raw = bytearray(file.read_bytes())
            begin = 8 + int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8:begin])
            for name, entry in header.items():
                if name != "__metadata__" and name.startswith(kind):
                    first, last = (begin + offset for offset in entry["data_offsets"])
                    draw = random.Random(name)
                    made = {"zeros": b"\0", "ones": b"\xff"}.get(content)
                    size = last - first
                    raw[first:last] = draw.randbytes(size) if made is None else made * size
            file.write_bytes(raw)
            _resum(path, file)


def _resum(path: Path, file: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        for entry in content["files"]:
            if entry["name"] == file.name:
                entry.update(bytes=file.stat().st_size, sha256=sha256_of(file))

    forge(path, change)


WRONG: tuple[Any, ...] = (None, -1, 0, 1, 2**31, 2**62, 2**63, 1.5, True, "4", [], {}, float("1e308"))


def _set(place: tuple[str, ...], value: Any, content: dict[str, Any]) -> None:
    for name in place[:-1]:
        content = content[name]
    content[place[-1]] = value


def _checkpoints() -> list[tuple[str, Attack]]:
    counters = ("step", "round", "update", "skipped_updates", "samples", "ended_early_of")
    cursors = ("epoch", "sample", "file", "file_sample", "fingerprint")
    places: list[tuple[str, ...]] = [("record", "counters", name) for name in counters]
    places += [("record", "ranks", "0", "cursor", name) for name in cursors]
    places += [("record", "learning_rate", name) for name in ("scale", "fixed")]
    places += [("record", "course", name) for name in ("losses", "log_norms", "rollbacks")]
    places += [
        ("record", name) for name in ("loss_scale", "callbacks", "batch_sizes", "parameters", "counters", "ranks")
    ]
    places += [("sequence",), ("tensors", "random/0/cpu"), ("record", "ranks", "0", "left_out")]
    cases: list[tuple[str, Attack]] = [
        (f"{'.'.join(place)} is {value!r}", partial(_forged, partial(_set, place, value)))
        for place in places
        for value in WRONG
    ]
    cases += [
        (f"{kind} of {content}", partial(_forged_tensor, kind, content))
        for kind in ("random/", "weights/", "slots/", "states/")
        for content in ("zeros", "ones", "noise")
    ]
    return cases


ROWS = (
    Row("storage", "operations that fail or stall", _row(_failures)),
    Row("storage", "files that cannot grow", _row(_limits)),
    Row("storage", "folders removed while it runs", _row(_folders)),
    Row("clocks", "frozen or jumping", _row(_clocks)),
    Row("files", "forged state of a run, resumed", _row(_checkpoints, again=False)),
)
