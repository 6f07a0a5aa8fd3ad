"""In which order the ranks of a pipeline compute: one file per schedule, and their registry."""
