"""What a command raises when its input was good and the run still failed."""

from __future__ import annotations


class RunError(RuntimeError):
    """The run failed; the message is for the user. The command line prints it and exits with 1."""
