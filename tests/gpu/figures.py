"""Figures that tests on a GPU print: they are read in the log of a session."""

import sys


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
