"""Losses as ONNX nodes: where they start, their terms, and a loss model of the user's own."""
