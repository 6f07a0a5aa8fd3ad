"""`onward.fit`: from a model and data to a trained model in one call."""
