"""A GPU that torch believes in, on a machine that has none."""
