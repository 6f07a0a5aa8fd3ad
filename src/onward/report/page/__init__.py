"""A run, or several compared, as one HTML page that needs nothing else: no network, no other file."""
