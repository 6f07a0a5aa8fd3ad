"""ONNX node -> torch. `registry` knows which function lowers which operator version, `program`
strings them into one `torch.fx` graph, `module` wraps that graph with its weights as a `torch.nn.Module`."""
