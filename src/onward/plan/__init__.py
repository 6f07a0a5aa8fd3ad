"""Who does what: which rank holds which weights, computes which nodes, and talks to whom; frozen values, no torch."""
