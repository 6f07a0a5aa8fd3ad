"""Classical machine learning, the domain ai.onnx.ml: its operators rewritten so that they are computed and trained."""
