"""Tests of onward.graph."""
