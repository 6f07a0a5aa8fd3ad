"""The checksum of the model that adapters are of: any bit, name or shape counts."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.graph.adapters.base_checksum import base_checksum, why_other_base


def model_of(**arrays: np.ndarray) -> ir.Model:
    values = [ir.Value(name=name, const_value=ir.Tensor(array, name=name)) for name, array in arrays.items()]
    return ir.Model(ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 18}), ir_version=10)


W = np.array([1.0, 2.0], np.float32)


def test_what_changes_it() -> None:
    own = base_checksum(model_of(w=W), ["w"])
    assert base_checksum(model_of(w=W.copy()), ["w"]) == own
    others = [{"v": W}, {"w": W[None]}, {"w": np.nextafter(W, 3)}, {"w": W.view(np.int32)}, {"w": W, "b": W}, {}]
    found = {base_checksum(model_of(**other), ["w"]) for other in others}
    assert own not in found
    assert len(found) == len(others)


def test_without_adapters_there_is_none() -> None:
    assert base_checksum(model_of(w=W), []) == ""


def test_what_is_said_of_another_base() -> None:
    assert why_other_base("a", "a") == why_other_base("", "b") == why_other_base("a", "") == ""
    assert "adapters of a base model with the checksum a, but the model has b" in why_other_base("a", "b")
