"""Experiment trackers: W&B, MLflow and Aim as callbacks that report what the console shows."""
