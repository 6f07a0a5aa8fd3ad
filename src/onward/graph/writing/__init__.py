"""From a model to files: next to their place first, and moved there when they are complete."""
