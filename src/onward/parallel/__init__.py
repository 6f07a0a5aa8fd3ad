"""Many processes: how they find each other, what they exchange, how one failure ends all; names `torch.distributed`."""
