"""Hook: the trace path, from the coordinator to engine choice.

The coordinator may lengthen its rows only if the API servers cut them back, since vLLM's own chooser unpacks
exactly three columns: the two changes are one hook, in force together or not at all.
"""

from __future__ import annotations

from . import coordinator, engine_choice
from .guard import Hook


def _install() -> None:
    engine_choice.check()
    coordinator.check()
    engine_choice.install()
    coordinator.install()


HOOKS = (Hook("trace-path", _install),)
