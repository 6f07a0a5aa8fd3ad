"""Weights that are stored in few bits: blocks of codes that share a scale, and other numbers written in their place."""
