"""Watchers of a run: console, TensorBoard, metrics file, profiler."""
