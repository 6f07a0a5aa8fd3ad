"""Programs rewritten for training: joined linear layers, FP8 matmuls, recomputed inputs, sparse gradients."""
