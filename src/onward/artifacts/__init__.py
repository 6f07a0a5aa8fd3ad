"""What leaves onward: inference models, optimized and quantized ones."""
