"""Fusion: operators written out node by node become one node each. What it writes is never exported."""
