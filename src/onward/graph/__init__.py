"""ONNX -> ONNX on the entire model: reading, choosing weights, loss. No torch, no ranks."""
