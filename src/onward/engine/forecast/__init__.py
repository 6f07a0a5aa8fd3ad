"""What a run will need before it starts: memory, traffic, the largest micro-batch, and speed on random data."""
