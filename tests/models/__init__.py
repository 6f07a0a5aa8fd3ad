"""Tests of `onward.models`."""
