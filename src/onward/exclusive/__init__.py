"""Who writes where: locks on output folders that name their holder, and temporary files that name their process."""
