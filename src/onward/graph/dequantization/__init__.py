"""Integer networks made trainable: quantized operators written out as real ones between Quantize and Dequantize."""
