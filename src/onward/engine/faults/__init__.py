"""What goes wrong while training: losses that are not finite, slow ranks, memory, corruption, preemption."""
