"""ONNX -> ONNX on the whole model: reading, choosing weights, loss. No torch, no ranks."""
