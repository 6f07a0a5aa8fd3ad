"""Frozen weights in fewer bits: which of them, in which numbers, and the nodes that dequantize them."""
