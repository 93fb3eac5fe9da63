"""What waits at `gimbal route` while nodes are silent, busy or gone, and for how long."""

from __future__ import annotations

import asyncio
import errno
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

import aiohttp
from gimbal_runtime.node_report import Prefill
from gimbal_runtime.tools.route_dispatch import DispatchConfig, Dispatcher, Ticket
from gimbal_runtime.tools.route_monitor import Monitor
from gimbal_runtime.tools.route_nodes import DECODE, PREFILL, Node
from gimbal_runtime.tools.route_proxy import Proxy, RouteSettings
from route_fakes import QUICK, fleet, get, make_report, reach, run

BUSY = {"prefills": (Prefill("x", 4096, 0), Prefill("y", 4096, 0))}
DEFLECTING = {"deflected": ("z",), "prefills": (Prefill("z", 4096, 0),)}


def make_node(role: str, name: str, at: float = 0.0, **changes: Any) -> Node:
    node = Node(name, role)
    node.alive = True
    node.observe(make_report(**changes), at)
    return node


def test_a_decode_node_whose_reports_have_stopped_gets_nothing_while_another_one_reports() -> None:
    """Also when that one's room is not known, because a prompt on its way there could not be counted."""
    now = [6.0]
    silent, other = make_node(DECODE, "silent"), make_node(DECODE, "other", 6.0)
    dispatcher = Dispatcher([], [silent, other], clock=lambda: now[0])
    taken = [dispatcher.take_decode(Ticket(str(place), None)) for place in range(4)]
    assert taken == [other] * 4
    assert dispatcher.take_decode(Ticket("a", 10), {other}) is silent


def test_a_node_that_is_found_again_has_to_report_again_before_it_counts_as_one_that_does() -> None:
    """What answers may be its API server alone; one that has never reported has no reports that could stop."""
    found, other, never = make_node(DECODE, "found"), make_node(DECODE, "other"), Node("never", DECODE)
    never.alive = True
    found.lose("gone")
    found.alive = True
    assert [node.silent(0.0) for node in (found, other, never)] == [True, False, False]
    dispatcher = Dispatcher([], [found, never], clock=lambda: 0.0)
    assert [dispatcher.take_decode(Ticket(name, None)).url for name in "ab"] == ["never", "never"]
    found.observe(make_report(), 0.0)
    assert not found.silent(0.0)
    assert dispatcher.take_decode(Ticket("c", 10)) is found


def test_prompts_are_counted_by_nodes_that_report() -> None:
    class Counting:
        def __init__(self) -> None:
            self.asked: list[str] = []

        async def count_tokens(self, node: Node, body: Any) -> None:
            self.asked.append(node.url)

    proxy = Proxy(RouteSettings(prefill=("p",), decode=("d0", "d1", "d2"), **QUICK))
    for node in proxy.nodes:
        node.alive = True
        node.observe(make_report(), time.monotonic() - (100.0 if node.url in ("d0", "d1") else 0.0))
    proxy._upstream = Counting()  # type: ignore[assignment]
    assert asyncio.run(proxy._count({"prompt": "one two"})) is None
    assert proxy._upstream.asked == ["d2", "p"]  # type: ignore[attr-defined]


def test_the_time_in_a_prefill_nodes_queue_is_no_time_without_a_node() -> None:
    async def test() -> None:
        now = [0.0]
        prefill, decode = make_node(PREFILL, "p", **BUSY), make_node(DECODE, "d", **DEFLECTING)
        dispatcher = Dispatcher([prefill], [decode], DispatchConfig(hold_timeout=30.0), clock=lambda: now[0])
        dispatcher.link.add(1e9, 1.0)
        task = asyncio.ensure_future(dispatcher.place(Ticket("a", 100)))
        await reach(lambda: dispatcher.held() == 1)
        now[0] = 40.0
        for node in (prefill, decode):
            node.observe(make_report(**(BUSY if node is prefill else DEFLECTING)), 40.0)
        prefill.lose("gone")
        dispatcher.pump()
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not task.done()
        decode.observe(make_report(), 41.0)
        dispatcher.pump()
        assert (await asyncio.wait_for(task, 5.0)).node is decode

    run(test())


def test_however_often_it_is_looked_at_again_a_request_without_a_node_waits_no_longer_than_that() -> None:
    async def test() -> None:
        now = [0.0]
        decode = make_node(DECODE, "d", **DEFLECTING)
        dispatcher = Dispatcher([], [decode], DispatchConfig(hold_timeout=30.0), clock=lambda: now[0])
        patience: list[float | None] = []
        wait = dispatcher._wait

        async def remember(entry: Any, queue: Any, seconds: float | None) -> Any:
            patience.append(seconds)
            return await wait(entry, queue, seconds)

        dispatcher._wait = remember  # type: ignore[method-assign]
        task = asyncio.ensure_future(dispatcher.place(Ticket("a", 100)))
        for passed in (10.0, 25.0, 40.0):
            await reach(lambda: dispatcher.held() == 1)
            now[0] = passed
            decode.observe(make_report(), passed)
            dispatcher.pump()  # it can be taken,
            decode.observe(make_report(**DEFLECTING), passed)  # and no longer when its turn comes
            if passed < 40.0:
                await reach(lambda passed=passed: len(patience) == (2 if passed == 10.0 else 3))
        with pytest.raises(Exception, match="in time"):
            await asyncio.wait_for(task, 5.0)
        assert patience == [30.0, 20.0, 5.0, 0.0]

    run(test())


def test_many_requests_that_nobody_can_take_cost_no_decisions() -> None:
    """They are looked at with every report of every node and with every arrival."""

    async def test() -> None:
        decode = make_node(DECODE, "d", **DEFLECTING)
        dispatcher = Dispatcher([Node("p", PREFILL)], [decode], clock=lambda: 0.0)
        decide, decisions = dispatcher._decide, []

        def counted(ticket: Ticket, excluded: Any) -> Any:
            decisions.append(ticket)
            return decide(ticket, excluded)

        dispatcher._decide = counted  # type: ignore[method-assign]
        tasks = [asyncio.ensure_future(dispatcher.place(Ticket(str(place), 100))) for place in range(50)]
        await reach(lambda: dispatcher.held() == 50)
        dispatcher.pump()
        assert len(decisions) == 50  # one for each at its arrival
        decode.observe(make_report(), 0.0)
        dispatcher.pump()
        done, _ = await asyncio.wait(tasks, timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
        assert [one.result().node for one in done] == [decode]
        assert tasks[0] in done
        await reach(lambda: dispatcher.held() == 49)
        decode.lose("gone")
        dispatcher.pump()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(answer) for answer in answers[1:]] == ["no decode node answers"] * 49

    run(test())


@pytest.mark.parametrize("ticks", range(5))
def test_a_client_that_goes_away_in_the_moment_of_its_turn_has_gone_away(ticks: int) -> None:
    async def test() -> None:
        decode = make_node(DECODE, "d", **DEFLECTING)
        dispatcher = Dispatcher([], [decode], clock=lambda: 0.0)
        task = asyncio.ensure_future(dispatcher.place(Ticket("a", 100)))
        await reach(lambda: dispatcher.held() == 1)
        decode.observe(make_report(), 0.0)
        dispatcher.pump()
        for _ in range(ticks):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert decode.unfinished == 0
        assert dispatcher.held() == 0

    run(test())


class Refusing:
    """A session in which no connection can be opened."""

    def __init__(self, number: int) -> None:
        self._number = number

    def get(self, url: str, **options: Any) -> Any:
        key: Any = type("Key", (), {"host": "h", "port": 1, "ssl": False})()
        raise aiohttp.ClientConnectorError(key, OSError(self._number, "no connection"))


@pytest.mark.parametrize(
    ("number", "lost_after"),
    [(errno.ECONNREFUSED, 1), (errno.EHOSTUNREACH, 2), (errno.EMFILE, None), (errno.ENOBUFS, None)],
)
def test_what_the_router_itself_lacks_does_not_make_nodes_lost(number: int, lost_after: int | None) -> None:
    node = make_node(DECODE, "d")
    monitor = Monitor(Refusing(number), node, lambda *_: None)  # type: ignore[arg-type]
    asked = 0
    while node.alive and asked < 5:
        asyncio.run(monitor.check())
        asked += 1
    assert (None if node.alive else asked) == lost_after
    assert "no connection" in node.why


def test_models_are_asked_of_the_next_node_when_a_connection_breaks() -> None:
    async def test() -> None:
        async with fleet(1, 2) as (proxy, url, _, _):
            assert proxy._session is not None
            ask, asked = proxy._session.get, []

            def once(target: str, **options: Any) -> Any:
                if target.endswith("/v1/models") and not asked:
                    asked.append(target)
                    raise ConnectionResetError("closing transport")
                return ask(target, **options)

            proxy._session = SimpleNamespace(get=once)  # type: ignore[assignment]
            status, text = await get(f"{url}/v1/models")
            assert (status, len(asked), "tiny" in text) == (200, 1, True)

    run(test())
