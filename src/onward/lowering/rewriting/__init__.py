"""Programs rewritten for training: joined linear layers, 8-bit floats, recomputed inputs, sparse gradients."""
