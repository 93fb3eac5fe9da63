"""The door to every method: validation, choice of backend, evaluation of the result."""

from __future__ import annotations

from typing import Any

from . import host, reference
from .objective import evaluate
from .problem import Placement, PlacementProblem

METHODS = ("paper", "greedy", "eplb", "stay")
BACKENDS = ("auto", "host", "reference")
# One copy per expert is what their scores are about.
WITHOUT_REPLICAS = ("paper", "greedy")


def place(problem: PlacementProblem, *, method: str = "paper", backend: str = "auto") -> Placement:
    """Chooses the expert of every slot, layer by layer, and evaluates the choice.

    Args:
        problem: see `PlacementProblem`.
        method: "paper", the paper's heuristic (SPEC section 3.1, arXiv 2606.15177); "greedy", the same loop
            scored by the marginals of the cost (section 3.2, one window); "eplb", balance only, with replicas
            when there are spare slots; "stay", the current placement.
        backend: "host" is compiled, "reference" plain numpy; both give the same bytes. "auto" takes "host"
            where it is available.

    Returns:
        Placement; `slots` is the same bytes for the same problem on every machine. A layer without traffic
        keeps its current placement, or gets slot p = expert p mod E when there is none.

    Raises:
        ValueError: an unknown method or backend, "host" where it is not available, or spare slots with a
            method that places one copy per expert.
    """
    if method not in METHODS:
        raise ValueError(f"method: {method!r}; valid: {', '.join(METHODS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r}; valid: {', '.join(BACKENDS)}")
    if method in WITHOUT_REPLICAS and problem.num_slots != problem.num_experts:
        raise ValueError(
            f"method: {method!r} places one copy per expert, but there are {problem.num_slots} slots for "
            f"{problem.num_experts} experts; valid with spare slots: eplb, stay"
        )
    return evaluate(problem, _backend(backend).solve(problem, method))


def available_backends() -> dict[str, str]:
    """Backend name -> "ready", or the reason why it cannot be used."""
    return {"host": host.status(), "reference": "ready"}


def _backend(name: str) -> Any:
    reason = host.status()
    if name == "host" and reason != "ready":
        raise ValueError(f"backend: 'host' is not available: {reason}; valid: auto, reference")
    return reference if name == "reference" or reason != "ready" else host
