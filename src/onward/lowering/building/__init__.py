"""From ONNX nodes to a program: what each node calls, what stays in Python, and the segments it is cut into."""
