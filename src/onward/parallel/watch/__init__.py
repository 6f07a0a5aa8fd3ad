"""How processes of a run watch each other: heartbeats, failures told to all, stacks of a hang."""
