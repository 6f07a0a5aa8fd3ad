"""Train state, the three step modes, and the loop: a generator of step reports."""
