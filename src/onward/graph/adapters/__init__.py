"""Low-rank adapters (LoRA) next to frozen weights: which weights, how they are read, what adapters begin as, nodes."""
