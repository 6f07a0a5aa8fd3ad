"""What torch.optim lacks: LAMB, learning-rate schedules, loss scale, per-weight attributes."""
