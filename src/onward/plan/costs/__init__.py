"""What nodes cost in operations and bytes, where a graph is cut into segments, and what is recomputed."""
