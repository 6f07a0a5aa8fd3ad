"""The bundle that several files test."""

from tests.device.bundles import normalized

__all__ = ["normalized"]
