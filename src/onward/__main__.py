"""`python -m onward` is the command `onward`."""

from onward.cli import process

process()
