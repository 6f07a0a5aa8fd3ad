"""Plausible inputs for a file that nobody here made: by declared type and shape, by the names that exporters give, and
by a short table of what single files expect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

BATCH_SIZE = 2

Array = np.ndarray[Any, Any]

_DTYPES = {
    "float": np.float32, "double": np.float64, "float16": np.float16, "bool": np.bool_, "string": np.str_,
    "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16,
    "int32": np.int32, "uint32": np.uint32, "int64": np.int64, "uint64": np.uint64,
}  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """What a file expects of its inputs beyond types and shapes.

    Attributes:
        dimensions: sizes of symbolic dimensions, by name, or by "input:axis" where they have none.
        ranges: input -> (from, below) of whole numbers.
        constants: input -> the number that fills it.
        scales: input -> the standard deviation of normal values around 0.
    """

    dimensions: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)


_SPEECH = {"input": 0.1, "input_1": 0.1}
EXPECTED: tuple[tuple[str, Expected], ...] = (
    (r"silero", Expected({"sequence": 576, "seq_len": 4, "sequence_length": 4, "input:1": 576}, scales=_SPEECH)),
    (r"openwakeword/silero|silero_vad_legacy", Expected({"sequence": 512}, scales=_SPEECH)),
    (r"melspectrogram", Expected({"samples": 16000}, scales={"input": 1000.0})),
    (r"speechmos/.*sig_bak_ovr|basic-pitch", Expected(scales={"input_1": 0.1, "serving_default_input_2:0": 0.1})),
    (r"speechmos/Run", Expected({"frames": 150, "batch_size": 1})),
    (r"speechmos/plcmos", Expected({"frames": 150})),
    (r"ddddocr/common(_old)?\.|gutenye.*rec|rapidocr.*rec", Expected({"x:2": 48, "x:3": 160, "image_width": 160})),
    (r"ppocr_mobile.*cls", Expected({"x:2": 48, "x:3": 192})),
    (r"rapidocr.*det|nudenet", Expected({"x:2": 160, "x:3": 160, "height": 160, "width": 160})),
    (r"magika", Expected(ranges={"bytes": (0, 257)})),
    (r"sklearn/one_hot", Expected(ranges={"X": (5, 8)})),
    (r"brainmaze.*model[AB]", Expected({"time": 24})),
    (r"caustic", Expected(
        {"num_atoms": 48, "num_edges": 160, "num_residues": 6},
        {"element": (0, 4), "amino_acid": (0, 20), "atom_role": (0, 4), "edge_index": (0, 48), "seq_sep": (0, 5),
         "target_indices": (0, 48), "residue_types": (0, 20)},
    )),
    (r"rxnmap", Expected(ranges={"atoms": (3, 30), "neighbors": (2, 8), "distances": (2, 8), "roles": (2, 4)})),
    (r"nakdimon", Expected({"input_1:1": 24}, {"input_1": (1, 30)})),
    (r"piper-tts/model", Expected(ranges={"char_inputs": (1, 30), "diac_inputs": (0, 1)})),
    (r"slovorez", Expected({"input_layer:1": 20}, {"input_layer": (1, 30)})),
    (r"arabic-name", Expected({"src_len": 12, "tgt_len": 3}, {"src": (3, 40), "prefix": (3, 40)})),
    (r"text2tashkeel", Expected({"seq_len": 24, "sequence": 24, "seq": 24}, {"input": (1, 40), "input_ids": (1, 40)})),
)  # fmt: skip

_STATE = re.compile(r"^(h|c|h0|c0|hx|cx|state|hidden|past.*|.*_state)$", re.IGNORECASE)
_MASK = re.compile(r"mask", re.IGNORECASE)
_SEGMENT = re.compile(r"token_type|segment", re.IGNORECASE)
_LENGTH = re.compile(r"len(gth)?s?$", re.IGNORECASE)


def expected_of(file: str) -> Expected:
    """What the table says of a file: later rows add to earlier ones."""
    found = [expected for pattern, expected in EXPECTED if re.search(pattern, file)]
    return Expected(
        {name: size for one in found for name, size in one.dimensions.items()},
        {name: bounds for one in found for name, bounds in one.ranges.items()},
        {name: value for one in found for name, value in one.constants.items()},
        {name: scale for one in found for name, scale in one.scales.items()},
    )


def open_session(model: str | Path | bytes, optimize: bool = True) -> onnxruntime.InferenceSession:
    """A session of ONNX Runtime on one CPU thread."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def make_inputs(session: onnxruntime.InferenceSession, file: str, seed: int = 0) -> dict[str, Array]:
    """One batch of inputs that the session runs.

    Raises:
        ValueError: an input that no numbers can be made for (strings, sequences).
    """
    expected, rng = expected_of(file), np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for one in session.get_inputs():
        kind = re.fullmatch(r"tensor\((\w+)\)", one.type)
        if kind is None or kind[1] not in _DTYPES or kind[1] == "string":
            raise ValueError(f"input {one.name!r} is {one.type}")
        shape = [_size(one.name, axis, size, len(one.shape), expected) for axis, size in enumerate(one.shape)]
        made[one.name] = _values(one.name, np.dtype(_DTYPES[kind[1]]), shape, expected, rng)
    return made


def _size(name: str, axis: int, size: int | str | None, rank: int, expected: Expected) -> int:
    if isinstance(size, int):
        return size
    for key in (size, f"{name}:{axis}"):
        if key is not None and key in expected.dimensions:
            return expected.dimensions[key]
    if axis == 0 or (isinstance(size, str) and re.search(r"batch|^N$", size)) or _STATE.match(name):
        return BATCH_SIZE
    return 64 if rank == 4 else 16


def _values(
    name: str, dtype: np.dtype[Any], shape: Sequence[int], expected: Expected, rng: np.random.Generator
) -> Array:
    if name in expected.constants:
        return np.full(shape, expected.constants[name], dtype)
    if name in expected.ranges:
        return rng.integers(*expected.ranges[name], size=shape).astype(dtype)
    if name == "sr":
        return np.full(shape, 16000, dtype)
    if _MASK.search(name):
        return np.ones(shape, dtype)
    if _STATE.match(name) or _SEGMENT.search(name):
        return np.zeros(shape, dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        return np.full(shape, 16, dtype) if _LENGTH.search(name) else rng.integers(1, 100, shape).astype(dtype)
    return (rng.standard_normal(shape) * expected.scales.get(name, 1.0)).astype(dtype)
