"""Distillation: a teacher merged into the training graph, and losses that compare its values with the student's."""
