"""From a model to files: beside their place first, and moved there when they are complete."""
