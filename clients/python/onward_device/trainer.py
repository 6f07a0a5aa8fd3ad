"""Training with a device bundle: every call binds the state, runs a graph, and keeps what comes out as new state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from onward_device.bundle import Array, Bundle, BundleError
from onward_device.one_file import with_values
from onward_device.skipped_updates import SkippedUpdates
from onward_device.state_file import read_state, write_state

Batch = Mapping[str, Any]


class Trainer:
    """A model that is trained on this device.

    Attributes:
        bundle: that it was loaded from.
        gradient_norm: of the last update, before clipping; not finite: the update was skipped. None: there was none.
    """

    def __init__(
        self, bundle: Bundle, providers: Sequence[Any] = ("CPUExecutionProvider",), options: Any = None
    ) -> None:
        self.bundle = bundle
        self.gradient_norm: float | None = None
        self._providers = list(providers)
        self._options = options or session_options()
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._state: dict[str, ort.OrtValue] = {}
        self._spare: dict[str, ort.OrtValue] = {}
        self._set_state(bundle.first_state())

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
        options: Any = None,
        verify: bool = True,
    ) -> Trainer:
        """Opens a bundle.

        Args:
            folder: of the bundle.
            providers: execution providers of ONNX Runtime, the first that can computes.
            options: `onnxruntime.SessionOptions`; None: `session_options()`, which takes a number of threads.
            verify: compare the checksums of all files.

        Raises:
            BundleError: it is no bundle of this version, or a file was changed.
        """
        return cls(Bundle.open(folder, verify), providers, options)

    @property
    def updates(self) -> int:
        """Weight updates so far, skipped ones included."""
        return int(self._state["update_count"].numpy())

    @property
    def skipped_updates(self) -> int:
        """Updates that were skipped, because a gradient, the loss or a statistic was not finite."""
        return int(self._state["skipped_updates"].numpy())

    def train_step(self, batch: Batch) -> float:
        """A forward and backward pass, and the update where the gradients of enough passes are accumulated.

        Args:
            batch: feature or label -> array, the samples along the first axis.

        Returns:
            The loss of the batch. It says nothing of the update: one whose gradient is not finite is skipped, with a
            warning at the first.

        Raises:
            BundleError: a feature is missing or does not fit.
            SkippedUpdatesError: more updates in a row were skipped than `on_bad_loss.skip` of the run allows. Those by
                which a dynamic loss scale falls do not count.
        """
        features = self._features(batch, self.bundle.manifest["features"])
        before = self.skipped_updates, self._loss_scale()
        if "step" in self.bundle.manifest["graphs"]:
            results = self._run("step", features)
            loss = float(results["loss"].numpy())
        else:
            loss = float(self._run("train", features)["loss"].numpy())
            passes = int(self._state["accumulated_passes"].numpy())
            if passes < self.bundle.manifest["training"]["gradient_accumulation_steps"]:
                return loss
            results = self._run("update", {})
        self.gradient_norm = float(results["gradient_norm"].numpy())
        skipped, falls = self.skipped_updates > before[0], self._loss_scale() < before[1]
        self._watch.after_update(self.updates, skipped, falls, self.gradient_norm, loss)
        return loss

    def _loss_scale(self) -> float:
        """The dynamic one; 0: there is none."""
        held = self._state.get("loss_scale")
        return 0.0 if held is None else float(held.numpy())

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Metrics over all samples of some batches, in inference mode.

        Raises:
            BundleError: a feature is missing or does not fit, or there is no batch.
        """
        metrics, sums = self.bundle.manifest["metrics"], dict[str, float]()
        for batch in batches:
            features = self._features(batch, self._inputs_that_are_features("eval"))
            for name, value in self._run("eval", features).items():
                sums[name] = sums.get(name, 0.0) + float(value.numpy())
        if not sums:
            raise BundleError(
                "there are no batches to evaluate. Pass at least one; a generator that was read before is empty, too: "
                "pass a list, or make the generator again."
            )
        means = {
            one["name"]: sums[one["sum"]] / sums[one["count"]]
            for one in metrics
            if "sum" in one and sums.get(one["count"])
        }
        totals = [one for one in metrics if "total_of" in one and all(part in means for part in one["total_of"])]
        return {**{one["name"]: sum(means[part] for part in one["total_of"]) for one in totals}, **means}

    def predict(self, inputs: Batch) -> dict[str, Array]:
        """The outputs of the model with the present weights, by name.

        Raises:
            BundleError: an input is missing or does not fit.
        """
        features = self._features(inputs, self._inputs_that_are_features("infer"))
        return {name: value.numpy() for name, value in self._run("infer", features).items()}

    def state(self) -> dict[str, Array]:
        """A copy of weights, moments, running statistics, counters and accumulators, by name."""
        return {name: np.array(value.numpy()) for name, value in self._state.items()}

    def save_state(self, path: str | Path) -> None:
        """Writes the state as a safetensors file, next to its place first, with the checksum of its tensors.

        Raises:
            BundleError: the folder of `path` does not exist.
        """
        fields = {name: str(self.bundle.manifest[name]) for name in ("run_fields",) if name in self.bundle.manifest}
        _replace(path, write_state(self.state(), {"bundle": self.bundle.identity, **fields}))

    def load_state(self, path: str | Path) -> None:
        """Continues from a state that `save_state` wrote.

        Raises:
            BundleError: it is of another bundle, or no state, or its tensors are not those that were saved.
        """
        state, identity = read_state(path)
        if identity != self.bundle.identity:
            raise BundleError(
                f"{path} is a state of the bundle {identity[:12] or 'without a name'}; this one is "
                f"{self.bundle.identity[:12]}. Use the bundle that the state was trained with."
            )
        self.bundle.check_state(state, str(path))
        self._set_state(state)

    def export(self, path: str | Path) -> None:
        """Writes the model with its present weights, as one file for any ONNX runtime.

        Its graph is the one that was trained. For the user's own graph, run `onward export MODEL --device-state`.

        Raises:
            BundleError: the folder of `path` does not exist, or the model is larger than an ONNX file can be.
        """
        inputs = {one["name"] for one in self.bundle.manifest["graphs"]["infer"]["inputs"]}
        values = {name: array for name, array in self.state().items() if name in inputs}
        _replace(path, with_values(self.bundle.path_of("infer").read_bytes(), values, self.bundle.folder))

    def _set_state(self, state: Mapping[str, Array]) -> None:
        # The runtime takes the arrays' own memory, and writes later states into it.
        owned = {name: array if array.flags.writeable else array.copy() for name, array in state.items()}
        self._state = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in owned.items()}
        self._spare = {}
        self._watch = SkippedUpdates(self.bundle.manifest["training"])

    def _session(self, graph: str) -> ort.InferenceSession:
        if graph not in self._sessions:
            path = str(self.bundle.path_of(graph))
            self._sessions[graph] = ort.InferenceSession(path, self._options, providers=self._providers)
        return self._sessions[graph]

    def _run(self, graph: str, features: Mapping[str, Array]) -> dict[str, ort.OrtValue]:
        """Runs a graph on the state; outputs named `<state>_new` become the state, the others are returned.

        The state before goes into memory that the next state but one is written to: two of each are all there are.
        """
        session, described = self._session(graph), self.bundle.manifest["graphs"][graph]
        binding = session.io_binding()
        for one in described["inputs"]:
            name = one["name"]
            if name in features:
                binding.bind_cpu_input(name, features[name])
            else:
                binding.bind_ortvalue_input(name, self._state[name])
        names = [one["name"] for one in described["outputs"]]
        spare = {name: self._spare.pop(name.removesuffix("_new"), None) for name in names if self._is_state(name)}
        given = {name: value for name, value in spare.items() if value is not None}
        for name in names:
            if name in given:
                binding.bind_ortvalue_output(name, given[name])
            else:
                binding.bind_output(name)
        session.run_with_iobinding(binding)
        # Of memory that was given, the value that it was given as: it keeps the array alive whose memory it is.
        results = dict(zip(names, binding.get_outputs(), strict=True)) | given
        changed = {name.removesuffix("_new"): value for name, value in results.items() if self._is_state(name)}
        self._spare.update((name, self._state[name]) for name in changed)
        self._state.update(changed)
        return {name: value for name, value in results.items() if not self._is_state(name)}

    def _is_state(self, output: str) -> bool:
        return output.endswith("_new") and output.removesuffix("_new") in self._state

    def _inputs_that_are_features(self, graph: str) -> list[dict[str, Any]]:
        return [one for one in self.bundle.manifest["graphs"][graph]["inputs"] if one["name"] not in self._state]

    def _features(self, batch: Batch, described: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        found, sizes = dict[str, Array](), dict[str, int]()
        of_training = {one["name"]: one for one in self.bundle.manifest["features"]}
        unknown = sorted(
            set(batch) - of_training.keys() - {one["name"] for one in self._inputs_that_are_features("infer")}
        )
        if unknown:
            raise BundleError(
                f"the batch has {', '.join(map(repr, unknown))}, which no graph reads; expected "
                f"{', '.join(sorted(one['name'] for one in described))}. Leave out others, or fix the name."
            )
        for one in described:
            name = one["name"]
            if name not in batch:
                raise BundleError(f"the batch has no {name!r}; it has {', '.join(sorted(batch)) or 'nothing'}.")
            array = np.ascontiguousarray(batch[name])
            found[name] = _checked(name, array, one, sizes)
            about = of_training.get(name, {})
            if "classes" in about:
                _check_labels(name, array, about["classes"], about["ignored_label"])
            if "rows" in about:
                _check_indices(name, found[name], about["rows"])
        return found


def _replace(path: str | Path, content: bytes) -> None:
    """Writes a file next to its place first, so that it is complete or absent."""
    path = Path(path)
    if not path.parent.is_dir():
        raise BundleError(f"{path} cannot be written: there is no folder {path.parent}. Make it, or choose another.")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _checked(name: str, array: Array, described: Mapping[str, Any], sizes: dict[str, int]) -> Array:
    """An array in the type of an input; its axes are compared with those that have the same name elsewhere."""
    if described["dtype"] != "string" and array.dtype != np.dtype(described["dtype"]):
        array = _converted(name, array, np.dtype(described["dtype"]))
    shape = described["shape"]
    if array.shape[:1] == (0,):
        raise BundleError(f"{name!r} has the shape {list(array.shape)}. Leave out batches without samples.")
    if shape is None:
        return array
    if len(shape) != array.ndim or any(
        sizes.setdefault(size, given) != given if isinstance(size, str) and size != "?" else size not in ("?", given)
        for size, given in zip(shape, array.shape, strict=True)
    ):
        listed = [f"{size}={sizes[size]}" if size in sizes else size for size in shape]
        raise BundleError(f"{name!r} has the shape {list(array.shape)}; expected [{', '.join(map(str, listed))}].")
    return array


def _converted(name: str, array: Array, expected: np.dtype[Any]) -> Array:
    """Floats in another type of floats, or integers in another type of integers that holds them all.

    Integers are no floats: pixels of 0 to 255 would train a model that was made for 0 to 1, and nothing would show it.
    """
    kinds = [{"u": "i"}.get(dtype.kind, dtype.kind) for dtype in (array.dtype, expected)]
    if kinds[0] != kinds[1]:
        scaled = ", scaled as the model expects it" if kinds[1] == "f" else ""
        raise BundleError(f"{name!r} is {array.dtype}; expected {expected}. Convert it with .astype{scaled}.")
    found = array.astype(expected)
    if kinds[1] == "i" and not np.array_equal(found, array):
        wrong = array[found != array].flat[0]
        raise BundleError(
            f"{name!r} holds {wrong}, which {expected} cannot. Look whether the feature is the right one."
        )
    return found


def _check_labels(name: str, labels: Array, classes: int, ignored_label: int | None) -> None:
    """Compares labels with the classes: a runtime counts negative ones from the end, and fails for others."""
    wrong = labels[(labels < 0) | (labels >= classes)]
    wrong = wrong if ignored_label is None else wrong[wrong != ignored_label]
    if wrong.size:
        ignored = "" if ignored_label is None else f" or {ignored_label}, which does not count"
        raise BundleError(
            f"{name!r} holds the label {wrong[0]}; expected 0 to {classes - 1}{ignored}. Fix the data, or set "
            "loss.ignore_index and write the bundle again."
        )


def _check_indices(name: str, indices: Array, rows: int) -> None:
    """Compares indices with the rows of a table: a runtime counts negative ones from the end, and trains that row."""
    wrong = indices[~((indices > -1) & (indices < rows))]  # fractions are cut off before the lookup
    if wrong.size:
        raise BundleError(
            f"{name!r} holds the index {wrong[0]}; expected 0 to {rows - 1}, since it picks rows of a table that has "
            f"{rows}. {_how_to_fix_index(wrong[0])}"
        )


def _how_to_fix_index(index: Any) -> str:
    if index < 0:
        return "If it marks padding, write the padding's own index, and leave the padding out of the loss by labels."
    return "Make the indices with the tokenizer or vocabulary that the model was made for."


def session_options(threads: int = 0) -> Any:
    """The `onnxruntime.SessionOptions` that a trainer has unless it is given others.

    Messages are errors alone: the runtime warns of each value that a skipped update reads and its optimizer would
    rename. It plans no memory pattern, whose one block for a step takes up to half more memory, and no less time.

    Args:
        threads: that an operator computes with; 0: one for each core.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    options.intra_op_num_threads = threads
    return options
