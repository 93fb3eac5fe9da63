"""What a command raises when it cannot go on; the command line prints the message and picks the exit code."""

from __future__ import annotations


class InputError(ValueError):
    """The user's input is bad; the message names the option and what is valid. Exit code 2."""


class RunError(RuntimeError):
    """The run failed although its input was good; the message is for the user. Exit code 1."""
