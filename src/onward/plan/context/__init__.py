"""Context parallelism: which values are cut along the sequence, why that is sound, and the graph of a rank."""
