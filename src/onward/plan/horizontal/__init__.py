"""Tensor parallelism: which weights are cut, why that is sound, and the graph that one rank computes."""
