"""Training as plain ONNX: bundles that any ONNX Runtime trains with, and the way back from devices."""

from onward.device.artifacts import LossType, OptimType, generate_artifacts

__all__ = ["LossType", "OptimType", "generate_artifacts"]
