"""Checkpoints in the memory of the hosts, each file on two nodes, from which a run resumes after a failure."""
