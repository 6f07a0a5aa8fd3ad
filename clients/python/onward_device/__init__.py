"""Trains device bundles of onward with ONNX Runtime."""

from onward_device.bundle import Bundle, BundleError
from onward_device.skipped_updates import SkippedUpdatesError
from onward_device.trainer import Trainer, session_options

__all__ = ["Bundle", "BundleError", "SkippedUpdatesError", "Trainer", "session_options"]
