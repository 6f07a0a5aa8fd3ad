"""What a model is made of and what training would do with it, as a value and as text."""
