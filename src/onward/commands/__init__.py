"""The commands of `onward`: one file a command, with its arguments and what it runs.

A module of a command imports nothing slow before it runs, so that `--help` is there at once.
"""
