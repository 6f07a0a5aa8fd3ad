"""From a file to a model in the operators that the rest computes: checked, within limits, weights left on disk."""
