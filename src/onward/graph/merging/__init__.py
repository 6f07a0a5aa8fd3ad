"""Other models merged into the one that is trained: their opset, names, nodes and constants."""
