"""The proxy as a running server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from .errors import RunError
from .route_proxy import Proxy
from .server import HOST

SHUTDOWN_SECONDS = 5.0


@contextlib.asynccontextmanager
async def running(proxy: Proxy, host: str = HOST, port: int = 0) -> AsyncIterator[str]:
    """Serves inside the block; gives the root address. Port 0: a free one.

    Raises:
        RunError: the address cannot be listened on.
    """
    # Without handler_cancellation a client that goes away would leave its request running on the nodes.
    runner = web.AppRunner(
        proxy.app(), handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS, access_log=None
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as failure:
            raise RunError(f"cannot listen on {host}:{port}: {failure}") from failure
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
