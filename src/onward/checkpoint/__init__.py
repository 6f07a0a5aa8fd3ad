"""Saving and loading a run's state on top of torch.distributed.checkpoint: completely or not at all."""
