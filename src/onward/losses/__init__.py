"""What training can minimize: one file per loss, each a frozen value, and their registry."""
