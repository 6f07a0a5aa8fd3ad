"""Features of a batch on their way into the network: names, types, shapes and labels checked, moved to the device."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from onward.data.batches import Origin, origin_of
from onward.data.shard import FeatureSpec
from onward.engine.inputs.index_ranges import FeatureRange
from onward.engine.inputs.sample_shapes import fit_sample_shape
from onward.errors import DataError
from onward.graph.training_graph import TrainingGraph
from onward.lowering.kernels.dtypes import tensor_from_array
from onward.lowering.module import input_types
from onward.plan.context.cutting import FIXED_LENGTHS


class FeatureReader:
    """Turns features of batches into inputs of a graph.

    Args:
        graph: whose inputs they are.
        inputs: those of them that are read.
        device: where tensors go.
        dimensions: sizes that symbolic dimensions of the inputs must have.
        feature_ranges: features that are class labels or pick rows -> which there are.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        inputs: Sequence[str],
        device: torch.device,
        dimensions: Mapping[str, int] | None = None,
        feature_ranges: Mapping[str, FeatureRange] | None = None,
    ) -> None:
        self.inputs = tuple(inputs)
        self.device = device
        self.feature_ranges = feature_ranges or {}
        sizes = dimensions or {}
        self._labels = () if graph.loss_names is None else graph.loss_names.labels
        self._why_fixed = graph.model.metadata_props.get(FIXED_LENGTHS, "")
        self.dtypes, shapes = input_types(graph)
        self.shapes = {
            name: tuple(sizes.get(size, size) if isinstance(size, str) else size for size in shape)
            for name, shape in shapes.items()
        }
        self._fitted: dict[str, tuple[tuple[torch.dtype, torch.Size], tuple[int, ...]]] = {}

    def to_tensors(self, features: Mapping[str, Any], origin: Origin = ()) -> dict[str, torch.Tensor]:
        """Features of a batch (numpy arrays, batch axis first) as tensors on the device.

        Args:
            features: of the batch.
            origin: where its samples come from, for messages.

        Raises:
            DataError: a feature is missing, its type or shape does not fit the model's input, or a label is out of
                range.
        """
        self._check_names(features)
        return {name: self._to_tensor(name, features[name], origin) for name in self.inputs}

    def _to_tensor(self, name: str, array: Any, origin: Origin) -> torch.Tensor:
        tensor = array if isinstance(array, torch.Tensor) else tensor_from_array(array)
        found = tensor.dtype, tensor.shape
        known, shape = self._fitted.get(name, (None, ()))
        if found != known:
            self._check_type(name, tensor.dtype)
            shape = self._fitted_shape(name, tuple(tensor.shape))
            self._fitted[name] = found, shape
        tensor = tensor if tensor.shape == shape else tensor.reshape(shape)
        tensor = tensor.to(self.dtypes.get(name, tensor.dtype))
        if name in self.feature_ranges and tensor.device.type == "cpu":
            self.feature_ranges[name].check(name, tensor.numpy(), partial(origin_of, origin))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def check_specs(self, specs: Mapping[str, FeatureSpec]) -> None:
        """Checks what a source of data says of its samples, before any of them is computed.

        Raises:
            DataError: a feature is missing, or its type or shape does not fit the model's input.
        """
        self._check_names(specs)
        for name in self.inputs:
            self._check_type(name, tensor_from_array(np.empty(0, specs[name].dtype)).dtype)
            expected = self.shapes.get(name)
            batch = expected[0] if expected else 1
            self._fitted_shape(name, (batch if isinstance(batch, int) else 1, *specs[name].shape))

    def _check_names(self, given: Mapping[str, Any]) -> None:
        missing = [name for name in self.inputs if name not in given]
        if missing:
            raise DataError(
                f"the data have no feature {', '.join(map(repr, missing))}, which the model or its loss reads; they "
                f"have {', '.join(map(repr, given))}.{_suggestion(missing, given)} Correct the name (loss.label for a "
                "label), or map it in data.input_name_map (name in the file: name in the model). Fill inputs that are "
                "the same for every sample, such as a sampling rate or an initial state, with a number in "
                "data.fixed_inputs. Set data.segment_masks to compute an attention mask from a number per token."
            )

    def _check_type(self, name: str, found: torch.dtype) -> None:
        expected = self.dtypes.get(name, found)
        if found == expected:
            return
        if not torch.can_cast(found, expected) or (expected == torch.bool) != (found == torch.bool):
            raise DataError(
                f"feature {name!r} is {_short(found)} in the data; the model expects {_short(expected)}. "
                "Convert it to that type in the arrays, or pack the data again with it."
            )

    def _fitted_shape(self, name: str, found: tuple[int, ...]) -> tuple[int, ...]:
        expected = self.shapes.get(name)
        if expected is None or (not found and not expected):
            return found
        if found and expected and (isinstance(expected[0], str) or found[0] == expected[0]):
            sample = fit_sample_shape(found[1:], expected[1:])
            if sample is not None:
                return (found[0], *sample)
        who, hint = ("the loss" if name in self._labels else "the model"), self._why_fixed
        if name in self._labels and 0 < len(found) == len(expected) - 1:
            hint += " For labels that are class numbers, set loss.type to softmax_cross_entropy, without dense_labels."
        if found and expected and (isinstance(expected[0], str) or found[0] == expected[0]):
            seen = f"shape {_listed(found[1:])}" if found[1:] else "one number"
            shapes = f"{seen} per sample; {who} expects {_listed(expected[1:])}"
        else:
            shapes = f"shape {_listed(found)} (batch axis first); {who} expects {_listed(expected)}"
        raise DataError(
            f"feature {name!r} has {shapes}.{hint} Only axes of size 1 are added or removed, where there is "
            "one way to do it. Reshape the arrays or pack the data again with that shape, or name the right feature in "
            "data.input_name_map."
        )


def _listed(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _suggestion(missing: list[str], given: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(missing[0], list(given), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
