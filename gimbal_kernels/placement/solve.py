"""The door to every method: validation, choice of backend, evaluation of the result."""

from __future__ import annotations

from typing import Any

from . import cuda, host, reference, replica_host, replica_search
from .checks import LIMIT, is_number
from .objective import evaluate
from .portfolio import Effort
from .problem import Placement, PlacementProblem
from .replicas import kicks_for
from .two_level import start_by_node

METHODS = ("portfolio", "paper", "greedy", "eplb", "stay")
EFFORTS = ("fast", "default", "best")
BACKENDS = ("auto", "host", "reference", "cuda")
# Sums of shares over ranks stay within 32 bits.
MOST_RANKS = 1024
# From so many ranks on the search with spare slots starts by node: fewer than that it handles as well at once.
MANY_RANKS = 16
# One copy per expert is what their scores are about.
WITHOUT_REPLICAS = ("paper", "greedy")


def place(
    problem: PlacementProblem,
    *,
    method: str = "portfolio",
    effort: str = "default",
    max_moves: int | None = None,
    time_budget: float | None = None,
    backend: str = "auto",
) -> Placement:
    """Chooses the expert of every slot, layer by layer, and evaluates the choice.

    Args:
        problem: see `PlacementProblem`.
        method: "portfolio", local search for the lowest cost from several starts (SPEC section 3.3; with spare
            slots section 4: how many copies and where, together, never two of an expert on one rank); "paper",
            the paper's heuristic (section 3.1, arXiv 2606.15177); "greedy", the same loop scored by the marginals
            of the cost (section 3.2, one window); "eplb", balance only, with replicas when there are spare
            slots; "stay", the current placement.
        effort: how long "portfolio" searches: "fast" stops at the first local optimum, "default" kicks out of it
            min(128, 8 R) times, "best" 8 min(480, 12 R) times from each of two seeds.
        max_moves: experts per layer that "portfolio" may move off their current ranks, or None for any number.
            Where its free choice moves more, steepest descent from the current placement is taken instead, up
            to that many.
        time_budget: seconds after which "portfolio" starts no more kicks. Two machines may then choose
            differently: solve on one and broadcast, or set none.
        backend: "host" is compiled, "reference" plain numpy, "cuda" runs "portfolio" without spare slots or limits
            on a GPU; all give the same bytes. "auto": "cuda" where it can serve traffic given as a CUDA tensor;
            else "host" where it is available.

    Returns:
        Placement; without a time budget `slots` is the same bytes for the same problem on every machine. A layer
        without traffic keeps its current placement, or gets slot p = expert p mod E when there is none. Method
        "portfolio" keeps the current placement wherever it finds nothing of lower cost, unless that has an expert
        twice on a rank: no result of it ever does, as far as max_moves allows, whatever the moves cost.

    Raises:
        ValueError: an unknown method, effort or backend, one that is not available or cannot serve, a negative
            max_moves or time_budget, max_moves without a current placement, either of them with another method
            than "portfolio", or spare slots with a method that places one copy per expert.
    """
    for name, value, valid in (
        ("method", method, METHODS),
        ("effort", effort, EFFORTS),
        ("backend", backend, BACKENDS),
    ):
        if value not in valid:
            raise ValueError(f"{name}: {value!r}; valid: {', '.join(valid)}")
    if method in WITHOUT_REPLICAS and problem.num_slots != problem.num_experts:
        raise ValueError(
            f"method: {method!r} places one copy per expert, but there are {problem.num_slots} slots for "
            f"{problem.num_experts} experts; valid with spare slots: portfolio, eplb, stay"
        )
    _check_limits(problem, method, max_moves, time_budget)
    if _on_gpu(problem, method, backend, limited=(max_moves, time_budget) != (None, None)):
        kicks = Effort.named(effort, problem.num_ranks)
        return evaluate(problem, cuda.solve_portfolio(problem, kicks, device=cuda.device_of(problem)))
    chosen = _backend(backend)
    if method != "portfolio":
        return evaluate(problem, chosen.solve(problem, method))
    return evaluate(problem, _portfolio(problem, chosen, effort, max_moves, time_budget))


def _on_gpu(problem: PlacementProblem, method: str, backend: str, *, limited: bool) -> bool:
    if backend != "cuda" and (backend != "auto" or problem.traffic_device is None):
        return False
    reason = cuda.why_not(problem, method, limited=limited)
    if backend == "cuda" and reason is not None:
        raise ValueError(f"backend: 'cuda' is not available: {reason}; valid: auto, host, reference")
    return reason is None


def _portfolio(
    problem: PlacementProblem, one_copy: Any, effort: str, max_moves: int | None, time_budget: float | None
) -> Any:
    """Slots int32 [L, P]; spare ones on many ranks from a start by node too, unless "fast" has another."""
    if problem.num_slots == problem.num_experts:
        chosen = Effort.named(effort, problem.num_ranks)
        return one_copy.solve_portfolio(problem, chosen, max_moves=max_moves, time_budget=time_budget)
    compiled = one_copy is host and replica_host.status() == "ready"
    solver: Any = replica_host if compiled else replica_search
    kicks = kicks_for(effort, problem.num_experts, problem.num_slots)
    start = None
    if problem.num_ranks >= MANY_RANKS and (effort != "fast" or problem.current is None):
        start = start_by_node(problem, solver, one_copy)
    return solver.solve(problem, kicks, start=start, max_moves=max_moves, time_budget=time_budget)


def _check_limits(
    problem: PlacementProblem, method: str, max_moves: int | None, time_budget: float | None
) -> None:
    if method != "portfolio":
        for name, value in (("max_moves", max_moves), ("time_budget", time_budget)):
            if value is not None:
                raise ValueError(f"{name}: {value} with method {method!r}; valid: None, or method portfolio")
        return
    if problem.num_ranks > MOST_RANKS:
        raise ValueError(
            f"topology: {problem.num_ranks} ranks; valid for method portfolio: at most {MOST_RANKS}"
        )
    if max_moves is not None:
        if isinstance(max_moves, bool) or not isinstance(max_moves, int) or max_moves < 0:
            raise ValueError(f"max_moves: {max_moves!r}; valid: an integer >= 0, or None")
        if problem.current is None:
            raise ValueError(f"max_moves: {max_moves} without a current placement; valid: None")
    if time_budget is not None and not (is_number(time_budget) and 0 <= time_budget <= LIMIT):
        raise ValueError(f"time_budget: {time_budget!r}; valid: seconds >= 0, or None")


def available_backends() -> dict[str, str]:
    """Backend name -> "ready", or the reason why it cannot be used."""
    return {"host": host.status(), "reference": "ready", "cuda": cuda.status()}


def _backend(name: str) -> Any:
    reason = host.status()
    if name == "host" and reason != "ready":
        raise ValueError(f"backend: 'host' is not available: {reason}; valid: auto, reference")
    return reference if name == "reference" or reason != "ready" else host
