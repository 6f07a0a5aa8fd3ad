"""States as safetensors files, by their format alone: a header of JSON behind its length, and the tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward_device.bundle import FORMAT, Array, BundleError

_STORED = {
    "uint64": "U64", "int64": "I64", "float64": "F64", "float32": "F32", "uint32": "U32", "int32": "I32",
    "float16": "F16", "uint16": "U16", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Types by numpy's names, in the order in which safetensors' own library writes tensors."""
_LARGEST_HEADER_BYTES = 100_000_000


def write_state(state: Mapping[str, Array], about: Mapping[str, str]) -> bytes:
    """The bytes of a file with the format, some metadata and the checksum of the tensors."""
    order = list(_STORED)
    names = sorted(state, key=lambda name: (order.index(str(state[name].dtype)), name))
    header, parts, end = dict[str, Any](), list[bytes](), 0
    for name in names:
        array = state[name]
        begin, end = end, end + array.nbytes
        stored = _STORED[str(array.dtype)]
        header[name] = {"dtype": stored, "shape": list(array.shape), "data_offsets": [begin, end]}
        parts.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    tensors = b"".join(parts)
    metadata = {"format": FORMAT, **about, "sha256": hashlib.sha256(tensors).hexdigest()}
    text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + tensors


def read_state(path: str | Path) -> tuple[dict[str, Array], str]:
    """The tensors of a state file, and the identity of the bundle that it is of.

    Raises:
        BundleError: it is no state, or its tensors do not have the checksum that it records.
    """
    try:
        content = memoryview(Path(path).read_bytes())
    except FileNotFoundError:
        raise BundleError(f"there is no file {path}.") from None
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, _LARGEST_HEADER_BYTES):
        raise BundleError(f"{path} is no safetensors file: its header would take {length} bytes.")
    tensors = content[8 + length :]
    try:
        header = json.loads(bytes(content[8 : 8 + length]))
        about = dict(header.pop("__metadata__", {}))
        _check_offsets([tuple(entry["data_offsets"]) for entry in header.values()], len(tensors))
        state = {name: _tensor(entry, tensors) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path} is no safetensors file: its header is damaged ({error}).") from error
    if about.get("format") != FORMAT:
        raise BundleError(f"{path} is no state of a device bundle; save one with Trainer.save_state.")
    found = hashlib.sha256(tensors).hexdigest()
    if about.get("sha256", found) != found:
        raise BundleError(
            f"{path} was changed or damaged: the SHA-256 of its tensors is {found}, its header has {about['sha256']}. "
            "Copy the state again."
        )
    return state, str(about.get("bundle", ""))


def _check_offsets(all_offsets: Iterable[tuple[int, ...]], end: int) -> None:
    """Every byte belongs to one tensor: what is shifted in a damaged header would be the values of another.

    Raises:
        ValueError: it does not.
    """
    place = 0
    for begin, stop in sorted(all_offsets):
        if begin != place or stop < begin:
            raise ValueError(f"a tensor from byte {begin} to {stop}, where byte {place} comes next")
        place = stop
    if place != end:
        raise ValueError(f"tensors of {place} bytes, where there are {end}")


def _tensor(entry: Mapping[str, Any], tensors: memoryview) -> Array:
    """The tensor of an entry of the header.

    Raises:
        ValueError, KeyError, TypeError: its shape or type does not fit.
    """
    dtype = np.dtype({stored: name for name, stored in _STORED.items()}[entry["dtype"]]).newbyteorder("<")
    begin, end = entry["data_offsets"]
    if any(size < 0 for size in entry["shape"]):
        raise ValueError(f"the shape {entry['shape']}")
    return np.frombuffer(tensors[begin:end], dtype).reshape(entry["shape"])
