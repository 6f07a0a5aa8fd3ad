"""Quantization-aware training: quantizing and dequantizing put into a graph, with scales that training finds."""
