"""Pipeline stages and schedules: who computes which nodes, and in which order."""
