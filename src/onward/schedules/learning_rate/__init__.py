"""What the learning rate does after the warm-up: one file per decay, and their registry."""
