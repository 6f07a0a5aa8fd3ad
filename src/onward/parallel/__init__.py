"""Many processes: how they find each other and communicate, how one failure ends all; names `torch.distributed`."""
