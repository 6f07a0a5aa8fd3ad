"""The network of a rank: its weights as torch modules, their precision, and the forward pass, compiled or not."""
