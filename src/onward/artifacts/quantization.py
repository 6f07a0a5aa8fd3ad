"""Smaller and simpler inference models, by onnxruntime's and onnxscript's own tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onward.data.loader import DataLoader
from onward.engine.inputs.sample_shapes import fit_sample_shape
from onward.errors import DataError, ModelError, OnwardError, ParametersError
from onward.graph.reading.model_file import model_from_proto, read_model
from onward.graph.writing.model_saving import EXTERNAL_ABOVE_BYTES, save_model
from onward.parameters.limits import DEFAULT_LIMITS, UNLIMITED, Limits


@dataclass(frozen=True)
class Calibration:
    """Which samples show a static quantization the range of every activation.

    Attributes:
        data_dir: folder of shards.
        input_name_map: feature in the files -> input of the model; those not listed have the same name in both.
        batch_size, batches: how many samples a batch, and how many batches at most.
    """

    data_dir: Path
    input_name_map: Mapping[str, str]
    batch_size: int
    batches: int


def optimize_model(source: Path, target: Path, limits: Limits = DEFAULT_LIMITS) -> Path:
    """Folds constants, removes dead work and fuses what onnxscript's optimizer can, in standard operators.

    Raises:
        ModelError: the optimizer cannot take the model.
    """
    from onward.artifacts.simplification import simplify  # onnxscript takes long to import

    model = read_model(source, limits)
    try:
        simplify(model)
    except Exception as error:
        raise ModelError(f"onnxscript could not optimize the model: {error} Export it without --optimize.") from error
    save_model(model, target)
    return target


def quantize_model(
    source: Path,
    target: Path,
    kind: str,
    calibration: Calibration | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Path:
    """Writes a model in lower precision.

    Args:
        source, target: ONNX files.
        kind: "fp16" (inputs and outputs stay fp32), "int8-dynamic" (weights int8, activations on the fly) or
            "int8-static" (quantize/dequantize pairs with calibrated ranges).
        calibration: samples for "int8-static".
        limits: what the model may ask of the machine.

    Raises:
        ParametersError: onnxruntime is not installed, or `kind` is unknown.
        DataError: the calibration samples lack an input of the model, or there are none.
        ModelError: onnxruntime cannot quantize this model.
    """
    try:
        import onnxruntime  # noqa: F401
        from onnxruntime import quantization
    except ImportError as error:
        raise ParametersError("--quantize needs onnxruntime; install it with: pip install 'onward[export]'") from error
    if kind not in ("fp16", "int8-dynamic", "int8-static"):
        raise ParametersError(f"--quantize {kind!r} is unknown; use fp16, int8-dynamic or int8-static.")
    try:
        if kind == "fp16":
            _to_fp16(source, target)
        else:
            _to_int8(quantization, source, target, None if kind == "int8-dynamic" else calibration, limits)
    except OnwardError:
        raise
    except Exception as error:
        raise ModelError(f"onnxruntime could not quantize the model to {kind}: {error}") from error
    return target


def _to_fp16(source: Path, target: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = convert_float_to_float16(onnx.load(source), keep_io_types=True)
    # Read as any file, which sorts it: the casts of inputs are appended behind the nodes that read them.
    save_model(model_from_proto(model, str(source), None, UNLIMITED), target)


def _to_int8(quantization: Any, source: Path, target: Path, calibration: Calibration | None, limits: Limits) -> None:
    """Dynamic without calibration, else static."""
    prepared = target.with_name("prepared.onnx")
    model = read_model(source, limits)
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    large = sum(tensor.nbytes for tensor in tensors) > EXTERNAL_ABOVE_BYTES
    quantization.quant_pre_process(
        str(source), str(prepared), skip_symbolic_shape=True, skip_optimization=large, save_as_external_data=large
    )
    _forget_shapes_of_weights(prepared)
    if calibration is None:
        quantization.quantize_dynamic(
            str(prepared), str(target), weight_type=quantization.QuantType.QInt8, use_external_data_format=large
        )
        return
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    reader = _reader(quantization, inputs, calibration)
    quantization.quantize_static(
        str(prepared),
        str(target),
        reader,
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        use_external_data_format=large,
    )


def _forget_shapes_of_weights(path: Path) -> None:
    """Takes weights out of a model's `value_info`, where torch's exporter and onnx-ir list them, too.

    onnxruntime transposes the weight of a `Gemm` and leaves the shape there as it was, which shape inference refuses.
    """
    model = onnx.load(path, load_external_data=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    others = [value for value in model.graph.value_info if value.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(others)
    onnx.save(model, path)


def _reader(quantization: Any, inputs: Sequence[ir.Value], calibration: Calibration) -> Any:
    """onnxruntime's interface to calibration samples, over shards."""

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.feeds = _feeds(calibration, inputs)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    return Reader()


def _feeds(calibration: Calibration, inputs: Sequence[ir.Value]) -> Iterator[dict[str, np.ndarray]]:
    loader = DataLoader(calibration.input_name_map, calibration.data_dir)
    try:
        for number, batch in enumerate(loader.one_pass(calibration.batch_size)):
            if number >= calibration.batches:
                return
            missing = [str(value.name) for value in inputs if value.name not in batch.features]
            if missing:
                raise DataError(
                    f"the calibration data lack {', '.join(missing)}; they hold {', '.join(batch.features)}."
                )
            yield {str(value.name): _fitted(batch.features[str(value.name)], value) for value in inputs}
    finally:
        loader.close()


def _fitted(array: np.ndarray, value: ir.Value) -> np.ndarray:
    """A feature as an input takes it; where that is not possible onnxruntime says why."""
    sizes = [size if isinstance(size, int) else str(size.value) for size in value.shape or ()]
    sample = fit_sample_shape(array.shape[1:], sizes[1:]) if sizes else None
    return array if sample is None else array.reshape(array.shape[0], *sample)
