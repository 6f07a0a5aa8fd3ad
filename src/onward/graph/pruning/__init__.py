"""Pruning: which weights can be pruned, and along which axis."""
