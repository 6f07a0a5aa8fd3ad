"""From the data of a run to the tensors that a network reads: names, shapes, types and epochs."""
