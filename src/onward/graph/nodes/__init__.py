"""Facts about nodes and values that every pass needs: structure, shapes, known numbers, origin; and adding nodes."""
