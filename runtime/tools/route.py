"""`gimbal route`: a proxy that deflects prefills between prefill and decode servers (SPEC section 8)."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import logging
import math
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..deflection import DeflectionConfig
from ..iteration_model import MAX_ERROR
from .errors import InputError, RunError
from .server import HOST, check_port

if TYPE_CHECKING:
    from .route_proxy import Proxy, RouteSettings


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the sub-command."""
    parser = commands.add_parser(
        "route",
        help="proxy for prefill and decode servers, with prefill deflection",
        description="An OpenAI-compatible server in front of prefill and decode vLLM servers that were started "
        "with GIMBAL_NODE_STATISTICS=1. It predicts the time to first token on both and has a prompt computed on "
        "a decode server where that is clearly sooner. Prints its address once it serves, ends on Ctrl-C.",
    )
    parser.add_argument(
        "--prefill", nargs="+", required=True, metavar="URL", help="prefill servers, in order"
    )
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="decode servers, in order")
    parser.add_argument("--host", default=HOST, help=f"address to listen on (default: {HOST})")
    parser.add_argument("--port", type=int, default=8100, help="port to listen on (default: 8100)")
    policy = DeflectionConfig()
    for name, default, meaning in (
        (
            "--alpha",
            policy.alpha,
            "deflect when the decode node takes at most this share of the prefill node's time",
        ),
        ("--beta", policy.beta, "share of the strictest time between tokens that an iteration may take"),
        ("--ttft-slo", None, "seconds to first token that a deflected request must meet (default: any)"),
        ("--tbt-slo", None, "seconds between tokens of requests that do not say (default: no limit)"),
        ("--bandwidth", None, "bytes per second of the link (default: measured)"),
        ("--timeout", 300.0, "seconds without a byte until a server has failed a request (default: 300)"),
        ("--stale-after", 5.0, "seconds after which a server's report counts as missing (default: 5)"),
        ("--hold-timeout", 30.0, "seconds that a request waits while no server can take it (default: 30)"),
        ("--max-fit-error", MAX_ERROR, "relative error up to which a model is believed (default: 0.15)"),
    ):
        parser.add_argument(name, type=float, default=default, metavar="X", help=meaning)
    parser.add_argument("--no-deflection", action="store_true", help="prefill servers compute every prompt")
    parser.add_argument("--no-hold", action="store_true", help="route once on arrival, hold nothing back")
    parser.add_argument(
        "--kv-transfer-params", metavar="JSON", help="object for the prefill half, as the connector asks for"
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        default=0,
        metavar="N",
        help="prompts for each server at the start (default: 0)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="at the end: the last decisions, as JSON")
    parser.set_defaults(run=run)


def settings_from(arguments: argparse.Namespace) -> RouteSettings:
    """The settings of a proxy.

    Raises:
        InputError: an option that is not valid; names it and says what is.
    """
    from .route_dispatch import DispatchConfig
    from .route_proxy import RouteSettings

    prefill = [_address("--prefill", url) for url in arguments.prefill]
    decode = [_address("--decode", url) for url in arguments.decode]
    if len({*prefill, *decode}) < len(prefill) + len(decode):
        raise InputError("--prefill, --decode: an address comes twice; valid: each server once")
    for name in ("alpha", "beta", "timeout", "stale_after", "max_fit_error"):
        _positive(name, getattr(arguments, name))
    for name in ("ttft_slo", "tbt_slo", "bandwidth"):
        if getattr(arguments, name) is not None:
            _positive(name, getattr(arguments, name))
    if not 0.0 <= arguments.hold_timeout < math.inf:
        raise InputError(f"--hold-timeout: {arguments.hold_timeout}; valid: seconds >= 0")
    if arguments.warm_up < 0:
        raise InputError(f"--warm-up: {arguments.warm_up}; valid: an integer >= 0")
    deflection = DeflectionConfig(
        alpha=arguments.alpha,
        beta=arguments.beta,
        ttft_slo=math.inf if arguments.ttft_slo is None else arguments.ttft_slo,
    )
    return RouteSettings(
        prefill=tuple(prefill),
        decode=tuple(decode),
        dispatch=DispatchConfig(
            deflection=deflection,
            deflect=not arguments.no_deflection,
            hold=not arguments.no_hold,
            hold_timeout=arguments.hold_timeout,
        ),
        bandwidth=arguments.bandwidth,
        tbt_slo=arguments.tbt_slo,
        kv_params=_object("--kv-transfer-params", arguments.kv_transfer_params),
        timeout=arguments.timeout,
        stale_after=arguments.stale_after,
        max_fit_error=arguments.max_fit_error,
    )


def _address(option: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise InputError(f"{option}: {url!r}; valid: an address such as http://{HOST}:8000")
    return url.rstrip("/")


def _positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise InputError(f"--{name.replace('_', '-')}: {value}; valid: a finite number > 0")


def _object(option: str, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{option}: {text!r}; valid: a JSON object")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Serves until interrupted; 0."""
    missing = [name for name in ("aiohttp", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise RunError(f"not installed here: {', '.join(missing)}; vLLM brings them")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise InputError(f"--json: no folder {arguments.json.parent}; valid: a folder that is there")
    if arguments.json is not None and arguments.json.is_dir():
        raise InputError(f"--json: {arguments.json} is a folder; valid: a file")
    settings = settings_from(arguments)
    if arguments.host == HOST:
        check_port(arguments.port)
    from .route_proxy import Proxy

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    proxy = Proxy(settings)
    asyncio.run(_serve(proxy, arguments.host, arguments.port, arguments.warm_up))
    if arguments.json is not None:
        records = [record.as_dict() for record in proxy.records.recent()]
        arguments.json.write_text(json.dumps({"decisions": records}, indent=1) + "\n", encoding="utf-8")
    return 0


async def _serve(proxy: Proxy, host: str, port: int, warm_up: int) -> None:
    from .route_run import running
    from .route_warmup import warm_up_all

    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with running(proxy, host, port) as url:
        if warm_up:
            await warm_up_all(proxy.nodes, warm_up)
        print(f"gimbal route: serving on {url}", flush=True)
        await ended.wait()
