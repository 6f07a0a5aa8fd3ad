"""What an exporter lost or changed that matters for training, restored: dropout, tied weights, repeated rows."""
