"""Context parallelism at work: the operators by which ranks share sequences. Importing it registers them."""

from onward.parallel.context import attention, halo, operators

__all__ = ["attention", "halo", "operators"]
