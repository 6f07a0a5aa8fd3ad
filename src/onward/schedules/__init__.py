"""Schedules that RUN.yaml can name, one file each: of the learning rate, and of a pipeline."""
