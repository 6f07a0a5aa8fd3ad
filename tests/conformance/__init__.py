"""The ONNX standard's own backend tests, run against onward."""
