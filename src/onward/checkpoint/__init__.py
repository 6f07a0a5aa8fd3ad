"""Saving and loading a run's state on top of torch.distributed.checkpoint: whole or not at all."""
