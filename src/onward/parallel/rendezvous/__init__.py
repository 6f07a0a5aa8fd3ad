"""How processes of a run find each other: who started them, where they listen, the store they share."""
