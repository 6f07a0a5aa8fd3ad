"""States that came back from devices: read, compared with their bundle, and averaged."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from onward import __version__
from onward.device.bundle_files import FORMAT, MANIFEST, REQUIREMENTS, VERSION
from onward.device.layout import ACCUMULATED, LOSS_SCALE, SEED, SKIPPED
from onward.device.run_fields import RUN_FIELDS
from onward.errors import CheckpointError, ParametersError, StorageError
from onward.exclusive.temporary import replacing
from onward.untrusted_files import RefusedFile, open_regular, parse_json, read_text

Array = np.ndarray[Any, np.dtype[Any]]
_LARGEST_BYTES = 1 << 40
CHECKSUM = "sha256"
"""In the metadata of a state: of all bytes behind its header. States of older clients have none."""


@dataclass(frozen=True)
class DeviceState:
    """A state file.

    Attributes:
        path: of it.
        bundle: identity of the bundle that it is of.
        tensors: by name.
        run_fields: `write_fields` of the run of its bundle; empty: not recorded.
    """

    path: Path
    bundle: str
    tensors: Mapping[str, Array]
    run_fields: str = ""


def read_state(path: str | Path) -> DeviceState:
    """Reads a state that a client saved.

    Raises:
        CheckpointError: it is none, or its tensors do not have the checksum that it records.
        StorageError: it cannot be read.
    """
    path = Path(path)
    try:
        with open_regular(path, _LARGEST_BYTES) as file:
            content = file.read()
        data = 8 + int.from_bytes(content[:8], "little")
        about, tensors = parse_json(content[8:data]).get("__metadata__", {}), load(content)
    except (OSError, RefusedFile) as error:
        raise StorageError(
            f"the device state {path} cannot be read: {error}. Pass a file that a client saved."
        ) from error
    except (ValueError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is no safetensors file. Pass a file that a client saved.") from error
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no state of a device bundle. Pass a file that a client saved.")
    digest = hashlib.sha256(memoryview(content)[data:]).hexdigest()
    if about.get(CHECKSUM, digest) != digest:
        raise CheckpointError(
            f"{path} was changed or damaged: the SHA-256 of its tensors is {digest}, its header has {about[CHECKSUM]}. "
            "Copy the state again."
        )
    return DeviceState(path, str(about.get("bundle", "")), tensors, str(about.get(RUN_FIELDS, "")))


def write_state(state: DeviceState, path: str | Path) -> Path:
    """Writes a state that clients load.

    Raises:
        StorageError: it cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            about = {"format": FORMAT, "bundle": state.bundle}
            about |= {RUN_FIELDS: state.run_fields} if state.run_fields else {}
            content = save(dict(state.tensors))
            about[CHECKSUM] = hashlib.sha256(
                memoryview(content)[8 + int.from_bytes(content[:8], "little") :]
            ).hexdigest()
            unfinished.write_bytes(save(dict(state.tensors), about))
    except OSError as error:
        raise StorageError(
            f"the device state {path} cannot be written: {error.strerror or error}. Choose another path."
        ) from error
    return path


def read_manifest_of_bundle(folder: str | Path, state: DeviceState) -> Mapping[str, Any]:
    """The manifest of the bundle that a state is of.

    Raises:
        CheckpointError: it is no bundle of this version, requires what this version does not know, or is another one.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = parse_json(read_text(path))
    except (OSError, RefusedFile, ValueError) as error:
        raise CheckpointError(f"{folder} is no device bundle: {error}. Pass --bundle DIR.") from error
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} is no device bundle of version {VERSION}. Write it again with `onward device`."
        )
    unknown = sorted({str(one) for one in manifest.get("requires", ())} - REQUIREMENTS)
    if unknown:
        raise CheckpointError(
            f"{folder} is a device bundle that requires {', '.join(unknown)}, which onward {__version__} does not "
            f"know. Install the onward that wrote it ({manifest.get('written_by')})."
        )
    if manifest["identity"] != state.bundle:
        raise CheckpointError(
            f"{state.path} is a state of the bundle {state.bundle[:12]}, and {folder} is {manifest['identity'][:12]}. "
            "Pass the bundle that the state was trained with."
        )
    return manifest  # type: ignore[no-any-return]


def average_states(states: Sequence[DeviceState], weights: Sequence[float] | None = None) -> DeviceState:
    """FedAvg (McMahan et al. 2017): the weighted mean of weights, moments and running statistics, in float64.

    Counters are the largest of any state, the loss scale is the smallest.

    Args:
        states: of one bundle.
        weights: how much each counts, such as its number of samples; None: all the same.

    Raises:
        CheckpointError: a state is of another bundle, between two passes of an update, or not finite.
        ParametersError: weights that do not fit.
    """
    if not states:
        raise ParametersError("no state is given to average; pass files that clients saved.")
    first, shares = states[0], _shares(len(states), weights)
    for state in states:
        _check_averaged(state, first)
    found = {}
    for name, array in first.tensors.items():
        arrays = [state.tensors[name] for state in states]
        if name == SEED:
            found[name] = array
        elif name == LOSS_SCALE:
            found[name] = np.asarray(np.min(arrays, axis=0))
        elif array.dtype.kind in "iu":
            found[name] = np.asarray(np.max(arrays, axis=0))
        else:
            total = sum(share * one.astype(np.float64) for share, one in zip(shares, arrays, strict=True))
            found[name] = np.asarray(total, array.dtype)
    return replace(first, tensors=found)


def _shares(count: int, weights: Sequence[float] | None) -> list[float]:
    given = [1.0] * count if weights is None else list(weights)
    if len(given) != count:
        raise ParametersError(f"--weights has {len(given)} numbers for {count} states; pass one for each state.")
    total = math.fsum(given)
    if any(not math.isfinite(one) or one < 0 for one in given) or total <= 0:
        raise ParametersError(f"--weights is {given}; expected finite numbers from 0, not all of them 0.")
    return [one / total for one in given]


def _check_distinct(states: Sequence[DeviceState]) -> None:
    """Refuses a device that would count twice."""
    known = dict[bytes, DeviceState]()
    for state in states:
        digest = hashlib.sha256()
        for name in sorted(state.tensors):
            digest.update(name.encode() + b"\0" + np.ascontiguousarray(state.tensors[name]).tobytes())
        other = known.setdefault(digest.digest(), state)
        if other is state:
            continue
        if os.path.samefile(other.path, state.path):
            raise ParametersError(
                f"{state.path} is given twice. Give each state once, and how much each counts with --weights."
            )
        raise ParametersError(
            f"{other.path} and {state.path} hold the same tensors, so that a device would count twice. Give each "
            "device's state once, and how much each counts with --weights."
        )


def _check_averaged(state: DeviceState, first: DeviceState) -> None:
    if not state.bundle:
        raise CheckpointError(
            f"{state.path} does not record the bundle that it is of, so it cannot be compared with the others. Save it "
            "with a client."
        )
    if state.bundle != first.bundle:
        raise CheckpointError(
            f"{state.path} is a state of the bundle {state.bundle[:12]}, {first.path} of {first.bundle[:12]}. Average "
            "states of one bundle."
        )
    layouts = [{name: (a.dtype, a.shape) for name, a in one.tensors.items()} for one in (state, first)]
    if layouts[0] != layouts[1]:
        raise CheckpointError(f"{state.path} holds other tensors than {first.path}. Average states of one bundle.")
    passes = state.tensors.get(ACCUMULATED)
    if passes is not None and int(passes):
        raise CheckpointError(
            f"{state.path} was saved after {int(passes)} passes of an update that is not done. Save states after an "
            "update."
        )
    wrong = next((n for n, a in state.tensors.items() if a.dtype.kind == "f" and not np.isfinite(a).all()), None)
    if wrong is not None:
        raise CheckpointError(f"{state.path}: {wrong!r} is not finite. Leave this state out.")


@dataclass(frozen=True, kw_only=True)
class FedAdam:
    """Adam on a server (Reddi et al. 2021, "Adaptive Federated Optimization"), the mean change as its gradient.

    Attributes:
        learning_rate: of the server.
        first, second: decay of the moments.
        tau: added to the square root of the second moment.
    """

    learning_rate: float = 0.01
    first: float = 0.9
    second: float = 0.99
    tau: float = 1e-3

    def update(
        self, before: DeviceState, averaged: DeviceState, weights: Sequence[str], moments: Mapping[str, Array]
    ) -> tuple[DeviceState, dict[str, Array]]:
        """The next state of all devices, and the next moments of the server.

        Args:
            before: what the devices began the round with.
            averaged: the average of what they ended it with.
            weights: names of the weights; everything else is taken from `averaged`.
            moments: of the server; empty at first.

        Raises:
            CheckpointError: `before` is of another bundle.
        """
        _check_averaged(before, averaged)
        found, kept = dict(averaged.tensors), dict[str, Array]()
        for name in weights:
            old = before.tensors[name].astype(np.float64)
            change = averaged.tensors[name].astype(np.float64) - old
            zero = np.zeros_like(change)
            mean = self.first * moments.get(f"{name}_mean", zero) + (1 - self.first) * change
            spread = self.second * moments.get(f"{name}_spread", zero) + (1 - self.second) * change**2
            new = old + self.learning_rate * mean / (np.sqrt(spread) + self.tau)
            found[name] = new.astype(averaged.tensors[name].dtype)
            kept |= {f"{name}_mean": mean, f"{name}_spread": spread}
        return replace(averaged, tensors=found), kept


def done_updates(state: DeviceState) -> int:
    """Updates that were not skipped."""
    return int(state.tensors["update_count"]) - int(state.tensors[SKIPPED])


def average_files(
    paths: Sequence[str | Path],
    output: str | Path,
    *,
    weights: Sequence[float] | None = None,
    before: str | Path | None = None,
    server: str | Path | None = None,
    bundle: str | Path | None = None,
    optimizer: FedAdam | None = None,
) -> Path:
    """`average_states` of files; with `optimizer` a step of the server towards the average.

    Args:
        paths: states of one bundle.
        output: where the next state goes.
        weights: how much each counts.
        before: with `optimizer`: the state that the devices began the round with.
        server: with `optimizer`: file of the server's moments, which is written again.
        bundle: with `optimizer`: the bundle, which tells weights from other tensors.
        optimizer: of the server; None: the average is what comes next.

    Raises:
        CheckpointError, StorageError: as the functions above do.
        ParametersError: too; and one state alone without `optimizer`, or a state that is given twice.
    """
    if len(paths) == 1 and optimizer is None:
        raise ParametersError(
            f"{paths[0]} is the only state given, and is its own average. Pass the states of two or more devices."
        )
    states = [read_state(path) for path in paths]
    _check_distinct(states)
    averaged = average_states(states, weights)
    if optimizer is None:
        return write_state(averaged, output)
    if before is None or server is None or bundle is None:
        raise ParametersError(
            "FedAdam needs the state that the devices began the round with, a file for its moments, and the bundle; "
            "pass --before STATE, --server FILE and --bundle DIR."
        )
    manifest = read_manifest_of_bundle(bundle, averaged)
    names = [one["name"] for one in manifest["state"] if one["kind"] == "weight"]
    moments: Mapping[str, Array] = {}
    if Path(server).exists():
        held = read_state(server)
        if held.bundle != averaged.bundle:
            raise CheckpointError(f"{server} holds moments for the bundle {held.bundle[:12]}. Name another file.")
        moments = held.tensors
    following, kept = optimizer.update(read_state(before), averaged, names, moments)
    write_state(DeviceState(Path(server), averaged.bundle, kept), server)
    return write_state(following, output)
