"""Optimizers that RUN.yaml can name: a frozen value each, and their registry; `optim/` makes torch optimizers."""
