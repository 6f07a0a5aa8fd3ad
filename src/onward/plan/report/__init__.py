"""A plan as aligned text and as a picture."""
