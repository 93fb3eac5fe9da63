"""What the router believes of its nodes between two reports, and what it holds back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from gimbal_runtime.iteration_model import FitQuality
from gimbal_runtime.node_report import Computed, Prefill
from gimbal_runtime.tools.route_dispatch import DispatchConfig, Dispatcher, NoNode, Ticket
from gimbal_runtime.tools.route_nodes import DECODE, PREFILL, Link, Node, Sent
from route_fakes import MODEL, make_report


def make_node(role: str = PREFILL, name: str = "n", **changes: Any) -> Node:
    node = Node(name, role)
    node.alive = True
    node.observe(make_report(**changes), 0.0)
    return node


def prefills(*entries: tuple[str, int, int]) -> dict[str, Any]:
    return {
        "prefills": tuple(Prefill(*entry) for entry in entries),
        "resident": frozenset(name for name, _, _ in entries if name),
    }


def test_what_was_sent_counts_until_the_node_reports_it_and_not_twice() -> None:
    node = make_node(**prefills(("", 70, 5)))
    node.send(Sent("a", 100))
    assert node.queued(1.0) == [(70, 5), (100, 0)]
    node.observe(make_report(**prefills(("", 20, 55), ("a", 90, 10))), 1.0)
    assert node.queued(1.0) == [(20, 55), (90, 10)]
    node.observe(make_report(resident=frozenset({"a"})), 2.0)  # computed, and not answered yet
    assert node.queued(2.0) == []
    node.end("a")
    assert (node.queued(2.0), node.unfinished) == ([], 0)


def test_what_has_ended_since_the_report_is_gone() -> None:
    node = make_node(**prefills(("a", 90, 10)))
    node.send(Sent("a", 100))
    node.end("a")
    assert node.queued(0.0) == []
    node.observe(make_report(**prefills(("a", 50, 50))), 1.0)  # an abort takes until the next iteration
    assert node.queued(1.0) == [(50, 50)]


def test_names_of_ended_requests_are_not_collected_without_reports() -> None:
    silent, known = Node("n", PREFILL), make_node()
    for place in range(1000):
        for node in (silent, known):
            node.send(Sent(str(place), 10))
            node.end(str(place))
    assert (len(silent._ended), len(known._ended)) == (0, 0)


def test_a_report_grows_stale_and_a_lost_node_has_none() -> None:
    node = make_node()
    assert node.as_prefill(5.0, [], 1e9).candidate
    assert not node.as_prefill(5.1, [], 1e9).candidate
    assert node.as_decode(5.0).candidate
    assert not node.as_decode(5.1).candidate
    node.lose("gone")
    assert node.fresh(0.0) is None
    assert not node.as_decode(0.0).live


def test_an_unknown_length_makes_the_node_unknown() -> None:
    node = make_node()
    node.send(Sent("a", None))
    assert node.queued(0.0) is None
    assert not node.as_prefill(0.0, [], 1e9).candidate
    assert node.as_decode(0.0).kv_free is None
    node.observe(make_report(**prefills(("a", 40, 0))), 1.0)
    assert node.queued(1.0) == [(40, 0)]
    assert make_node().as_prefill(0.0, [None], 1e9).queued is None


@pytest.mark.parametrize(
    ("bandwidth", "kv_bytes"), [(None, 1000.0), (1e9, None)], ids=["bandwidth", "bytes per token"]
)
def test_an_unknown_link_is_not_a_free_one(bandwidth: float | None, kv_bytes: float | None) -> None:
    node = make_node(kv_bytes_per_token=kv_bytes)
    assert node.as_prefill(0.0, [], bandwidth).link_wait is None


def test_a_decode_node_with_what_is_on_its_way() -> None:
    node = make_node(DECODE, n_decode=2, kv_tokens=50, kv_free=1000, tbt_slo=0.5)
    node.send(Sent("a", 300, tbt_slo=0.2))
    node.send(Sent("b", 100, deflected=True))
    view = node.as_decode(0.0)
    assert (view.n_decode, view.kv_tokens, view.kv_free) == (3, 450, 600)
    assert (view.tbt_slo, view.deflected_in_flight) == (0.2, 1)
    node.send(Sent("c", 900))
    assert node.as_decode(0.0).kv_free == 0


def test_a_deflected_prompt_is_in_flight_until_it_is_computed() -> None:
    node = make_node(DECODE)
    node.send(Sent("a", 100, deflected=True))
    flying = make_report(**prefills(("a", 60, 40)), deflected=("a",))
    node.observe(flying, 1.0)
    assert node.as_decode(1.0).deflected_in_flight == 1  # once, though both know it
    node.observe(replace(flying, deflected=("a", "of another router")), 2.0)
    assert node.as_decode(2.0).deflected_in_flight == 2
    node.observe(make_report(resident=frozenset({"a"})), 3.0)
    assert node.as_decode(3.0).deflected_in_flight == 0
    node.observe(flying, 4.0)
    node.first_token("a")  # known before the next report
    assert node.as_decode(4.0).deflected_in_flight == 0


def test_every_completed_prompt_is_told_once() -> None:
    node = make_node(computed=(Computed("a", 1.0, 1.0),))
    later = (Computed("a", 1.0, 1.0), Computed("b", 2.0, 2.0))
    assert node.observe(make_report(computed=later), 1.0) == [Computed("b", 2.0, 2.0)]
    assert node.observe(make_report(computed=later), 2.0) == []


def test_how_far_a_model_is_believed() -> None:
    fitted = replace(MODEL, quality=FitQuality(0.3, 400.0, 20.0))
    for max_error, candidate in ((0.15, False), (0.29, False), (0.31, True)):
        node = Node("n", DECODE, max_error=max_error)
        node.alive = True
        node.observe(make_report(model=fitted), 0.0)
        assert node.as_decode(0.0).candidate is candidate
        node.observe(make_report(model=replace(fitted, quality=FitQuality(0.01, 400.0, 1.0))), 0.0)
        assert not node.as_decode(0.0).candidate  # never saw a prefill


def test_bandwidth_is_given_or_measured() -> None:
    assert Link(5.0).bandwidth == 5.0
    link = Link(forgetting=0.5)
    assert link.bandwidth is None
    link.add(100.0, 1.0)
    assert link.bandwidth == 100.0
    for _ in range(20):
        link.add(100.0, 4.0)
    assert link.bandwidth == pytest.approx(25.0, rel=1e-3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def make_dispatcher(prefill: list[Node], decode: list[Node], **settings: Any) -> tuple[Dispatcher, Clock]:
    clock = Clock()
    config = DispatchConfig(**settings)
    return Dispatcher(prefill, decode, config, link=Link(1e9), clock=clock), clock


async def waiting(task: asyncio.Task[Any]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


def test_held_while_the_prefill_node_has_an_iteration_to_do_and_sent_in_order() -> None:
    async def test() -> None:
        node, decode = make_node(name="p"), make_node(DECODE, "d", model=None)
        dispatcher, _ = make_dispatcher([node], [decode])
        # Besides the first there are to be 1,000 tokens: 0.1 s of its work.
        first = [await dispatcher.place(Ticket(f"f{place}", 400)) for place in range(4)]
        assert all(placement.node is node for placement in first)
        held = [asyncio.ensure_future(dispatcher.place(Ticket(f"h{place}", 400))) for place in range(3)]
        assert await waiting(held[0])
        assert dispatcher.held() == 3
        node.end("f0")
        dispatcher.pump()
        assert (await held[0]).node is node
        assert await waiting(held[1])
        node.end("f1")
        dispatcher.pump()
        await held[1]
        assert await waiting(held[2])

    run(test())


def test_a_held_request_is_deflected_when_a_decode_node_becomes_free() -> None:
    async def test() -> None:
        node = make_node(name="p", **prefills(("", 2048, 0), ("", 2048, 0)))
        decode = make_node(DECODE, "d", deflected=("other",))
        dispatcher, clock = make_dispatcher([node], [decode])
        task = asyncio.ensure_future(dispatcher.place(Ticket("a", 100)))
        assert await waiting(task)
        clock.now = 1.5
        node.observe(make_report(**prefills(("", 2048, 0), ("", 2048, 0))), 1.5)
        decode.observe(make_report(), 1.5)
        dispatcher.pump()
        placement = await task
        assert (placement.node, placement.chunks, placement.held) == (decode, (100,), 1.5)
        assert decode.as_decode(1.5).deflected_in_flight == 1
        # It is the only one: the next has to wait again.
        assert await waiting(asyncio.ensure_future(dispatcher.place(Ticket("b", 100))))

    run(test())


def test_nothing_is_deflected_before_the_first_transfer_tells_the_bandwidth() -> None:
    async def test() -> None:
        busy = prefills(("", 2048, 0), ("", 2048, 0))
        node, decode = make_node(name="p", **busy), make_node(DECODE, "d")
        link = Link()
        dispatcher = Dispatcher([node], [decode], link=link, clock=Clock())
        task = asyncio.ensure_future(dispatcher.place(Ticket("a", 100)))
        assert await waiting(task)
        link.add(1e9, 1.0)
        dispatcher.pump()
        assert (await task).node is decode

    run(test())


@pytest.mark.parametrize("why", ["failed it", "dead", "unknown"])
def test_a_bandwidth_that_no_prefill_node_will_tell_is_not_waited_for(why: str) -> None:
    async def test() -> None:
        node = make_node(name="p", **({"kv_bytes_per_token": None} if why == "unknown" else {}))
        decode = make_node(DECODE, "d")
        node.alive = why != "dead"
        dispatcher = Dispatcher([node], [decode], link=Link(), clock=Clock())
        placement = await dispatcher.place(Ticket("a", 100), {node} if why == "failed it" else ())
        assert placement.node is decode

    run(test())


def test_a_request_that_a_decode_node_has_failed_does_not_stop_the_others() -> None:
    async def test() -> None:
        node = make_node(name="p", **prefills(("", 2048, 0), ("", 2048, 0)))
        failing, busy = make_node(DECODE, "f"), make_node(DECODE, "b", deflected=("other",))
        dispatcher, _ = make_dispatcher([node], [failing, busy])
        failed = asyncio.ensure_future(dispatcher.place(Ticket("a-1", 100), {failing}))
        assert await waiting(failed)
        busy.observe(make_report(), 0.0)
        dispatcher.pump()
        assert (await failed).node is busy

    run(test())


@pytest.mark.parametrize("setting", ["deflect", "hold"])
def test_neither_deflected_nor_held_where_that_is_off(setting: str) -> None:
    async def test() -> None:
        node = make_node(name="p", **prefills(("", 2048, 0), ("", 2048, 0)))
        dispatcher, _ = make_dispatcher([node], [make_node(DECODE, "d")], **{setting: False})
        task = asyncio.ensure_future(dispatcher.place(Ticket("a", 100)))
        if setting == "deflect":
            assert await waiting(task)
            task.cancel()
        else:
            assert (await task).chunks
            assert (await dispatcher.place(Ticket("b", 100))).node is node  # at once, though it is full

    run(test())


def test_held_requests_of_a_node_that_is_lost_go_elsewhere() -> None:
    async def test() -> None:
        full = prefills(("", 2048, 0), ("", 2048, 0))
        nodes = [
            make_node(name="p0", **full),
            make_node(name="p1", **prefills(("", 9_000, 0), ("", 9_000, 0))),
        ]
        dispatcher, _ = make_dispatcher(nodes, [make_node(DECODE, "d", model=None)])
        task = asyncio.ensure_future(dispatcher.place(Ticket("a", 100)))
        assert await waiting(task)
        nodes[0].lose("gone")
        nodes[1].observe(make_report(), 0.0)
        dispatcher.pump()
        assert (await task).node is nodes[1]

    run(test())


def test_no_decode_node_is_told_at_once_also_to_who_waits() -> None:
    async def test() -> None:
        node, decode = make_node(name="p"), make_node(DECODE, "d")
        dispatcher, _ = make_dispatcher([node], [decode])
        with pytest.raises(NoNode):
            await dispatcher.place(Ticket("a", 100), [decode])
        node.lose("gone")
        decode.observe(make_report(deflected=("other",)), 0.0)
        task = asyncio.ensure_future(dispatcher.place(Ticket("b", 100)))
        assert await waiting(task)
        decode.lose("gone")
        dispatcher.pump()
        with pytest.raises(NoNode):
            await task

    run(test())


def test_cancelled_in_the_moment_of_being_placed_leaves_nothing_behind() -> None:
    async def test() -> None:
        node = make_node(name="p", **prefills(("", 2048, 0), ("", 2048, 0)))
        dispatcher, _ = make_dispatcher([node], [make_node(DECODE, "d", model=None)])
        task = asyncio.ensure_future(dispatcher.place(Ticket("a", 100)))
        assert await waiting(task)
        node.observe(make_report(), 0.0)
        dispatcher.pump()
        task.cancel()  # its result is there, and has not been read
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (node.unfinished, dispatcher.held()) == (0, 0)

    run(test())


def test_the_decode_node_with_most_room_takes_a_transferred_prompt() -> None:
    nodes = [
        make_node(DECODE, "d0", kv_free=500),
        make_node(DECODE, "d1", kv_free=900),
        make_node(DECODE, "d2", kv_free=None),
    ]
    dispatcher, _ = make_dispatcher([], nodes)
    taken = [dispatcher.take_decode(Ticket(str(place), 300)).url for place in range(4)]
    assert taken == ["d1", "d1", "d0", "d1"]  # 900, 600, then 500 against 300, then 200 against 300
    assert dispatcher.take_decode(Ticket("x", 300), nodes[:2]) is nodes[2]


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="hold_timeout: -1"):
        DispatchConfig(hold_timeout=-1.0)
