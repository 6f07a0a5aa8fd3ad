"""How processes of a run watch each other: heartbeats, failures reported to all, stacks of a hang."""
