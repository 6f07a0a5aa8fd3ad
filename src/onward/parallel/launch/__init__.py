"""Starting and restarting the processes of a run, and joining them to one mesh."""
