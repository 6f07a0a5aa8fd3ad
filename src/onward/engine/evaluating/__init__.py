"""Evaluations of a round: means over a test set, metrics by name, and the best of them."""
