"""What a run could look like: from a model file, and data, to a RUN.yaml in which every choice has its reason."""
