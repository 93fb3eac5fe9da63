"""GET /gimbal/decisions on vLLM's API server: engine choice as it stands and its last decisions, as JSON.

Like /metrics it is open to whoever reaches the server; it shows engines, reasons, scores and numbers of tokens,
nothing of a request's content. `?last=N` asks for the last N decisions (50 unless told, 256 are kept). Each API
server shows its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .guard import HookMismatch, expect, logger, patch

MODULE = "vllm.entrypoints.launchers.app"
PATH = "/gimbal/decisions"


def serve(state: Callable[[int], dict[str, Any]], *, strict: bool) -> None:
    """Adds the route to the application that this process builds next.

    Called when an API server's client is built, which is before its routes are: other processes have no need to
    import the web framework.

    Args:
        state: gives what to show, for a number of decisions.
        strict: a vLLM that is not as expected is an error.

    Raises:
        RuntimeError: `strict`, and this vLLM is not as expected.
    """
    try:
        stock = expect(MODULE, "register_api_routers", ["args", "app"])
    except HookMismatch as error:
        message = f"Gimbal hook 'debug-endpoint' is not active, there is no {PATH}: {error}"
        if strict:
            raise RuntimeError(message) from error
        logger.warning(message)
        return

    def register(args: Any, app: Any, *more: Any, **named: Any) -> None:
        stock(args, app, *more, **named)
        try:
            app.add_api_route(PATH, _route(state), methods=["GET"], include_in_schema=False)
        except Exception:
            logger.exception("Gimbal hook 'debug-endpoint' failed; there is no %s", PATH)

    patch(MODULE, "register_api_routers", register)


def _route(state: Callable[[int], dict[str, Any]]) -> Callable[..., Any]:
    # The framework reads the annotations of a route's parameters, so they have to be types and not text.
    async def decisions(last=50):  # type: ignore[no-untyped-def]
        return state(last)

    decisions.__annotations__ = {"last": int}
    return decisions
