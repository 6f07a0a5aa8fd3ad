"""Pipeline stages on torch.distributed.pipelining: one stage as a module, tensors between stages, shared weights."""
