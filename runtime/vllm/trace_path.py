"""Hook: the trace path, from the engines over the coordinator to engine choice.

The coordinator may lengthen its rows only if the API servers cut them back, since vLLM's own chooser unpacks
exactly three columns; and without reports from the engines a choice by score would be worse than vLLM's own. So
the three changes are one hook, in force together or not at all.
"""

from __future__ import annotations

from . import coordinator, engine_choice, engine_stats
from .guard import Hook

PARTS = (engine_stats, engine_choice, coordinator)


def _install() -> None:
    for part in PARTS:
        part.check()
    for part in PARTS:
        part.install()


HOOKS = (Hook("trace-path", _install),)
