"""`gimbal route` in front of fake servers: every way in which a request can go, and in which a node can fail it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

import aiohttp
from gimbal_runtime.iteration_model import FitQuality, IterationModel
from gimbal_runtime.tools.route_proxy import CHAT, COMPLETIONS
from route_fakes import MODEL, FakeNode, fleet, make_report, reach

PROMPT = "one two three four five six seven eight"
SLOW = IterationModel(1.0, 1e-4, 1e-7, 1e-4, 1e-9)  # nobody would choose this node
UNFITTED = IterationModel(0.01, 0, 0, 0, 0, quality=FitQuality(0.1, 400.0, 0.0))


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def post(url: str, path: str = COMPLETIONS, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        return await send(session, url, path, **body)


async def send(session: Any, url: str, path: str = COMPLETIONS, **body: Any) -> tuple[int, Any]:
    default = {"model": "tiny"} | ({"prompt": PROMPT} if path == COMPLETIONS else {})
    async with session.post(url + path, json=default | body) as answer:
        text = await answer.text()
        return answer.status, text if body.get("stream") and answer.status == 200 else json.loads(text)


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


def prefer_prefill(*decode: FakeNode) -> None:
    for node in decode:
        node.report = make_report(model=SLOW)


async def settled(proxy: Any, *fakes: FakeNode) -> None:
    """Until the proxy has the fakes' reports as they are now."""
    by_url = {node.url: node for node in proxy.nodes}
    await reach(lambda: all(by_url[fake.url].report == fake.report for fake in fakes))


def test_prefilled_by_one_node_and_decoded_by_another() -> None:
    async def test() -> None:
        async with fleet() as (proxy, url, [prefill], [decode]):
            prefer_prefill(decode)
            prefill.kv_params = {"remote_host": "here"}
            await settled(proxy, decode)
            status, answer = await post(url, max_tokens=2, min_tokens=2, vllm_xargs={"mine": 1})
            assert (status, answer["choices"][0]["text"]) == (200, "t0 t1 ")
            [first], [second] = prefill.bodies, decode.bodies
            assert (first["max_tokens"], first["stream"], "min_tokens" in first) == (1, False, False)
            assert (second["max_tokens"], second["min_tokens"]) == (2, 2)
            assert second["kv_transfer_params"] == {"remote_host": "here"}
            name = first["vllm_xargs"].pop("gimbal_request")
            assert first["vllm_xargs"] == {"mine": 1}
            assert second["vllm_xargs"] == {"mine": 1, "gimbal_request": name, "gimbal_transferred": 1}
            assert prefill.headers[0]["X-Request-Id"] == name
            assert [node.unfinished for node in proxy.nodes] == [0, 0]

    run(test())


def test_deflected_with_its_chunks_and_never_seen_by_the_prefill_node() -> None:
    async def test() -> None:
        async with fleet() as (proxy, url, [prefill], [decode]):
            prefill.queue(("x", 50_000, 0))
            await settled(proxy, prefill)
            # With a limit of 30 ms beside a decoding request 198 tokens fit into an iteration.
            decode.report = make_report(n_decode=1, kv_tokens=10, tbt_slo=0.03)
            await settled(proxy, decode)
            status, _ = await post(url, prompt=list(range(300)))
            assert (status, prefill.bodies) == (200, [])
            assert decode.bodies[0]["vllm_xargs"]["gimbal_chunks"] == [128, 172]
            status, text = await get(f"{url}/debug/decisions")
            [record] = json.loads(text)["decisions"]
            assert (record["reason"], record["tokens"], record["outcome"]) == ("deflected", 300, "200")
            assert record["ttft_decode"] < record["ttft_prefill"]
            assert record["cost"] > 0.0

    run(test())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_is_passed_on_byte_for_byte(path: str) -> None:
    async def test() -> None:
        messages = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {}
        async with fleet() as (proxy, url, _, [decode]):
            _, direct = await post(decode.url, path, stream=True, **messages)
            status, text = await post(url, path, stream=True, **messages)
            assert (status, text) == (200, direct)
            assert text.endswith("data: [DONE]\n\n")
            assert proxy.records.recent()[0].tokens == 8

    run(test())


def test_tokens_arrive_while_later_ones_are_still_computed() -> None:
    async def test() -> None:
        async with fleet() as (_, url, _, [decode]), aiohttp.ClientSession() as session:
            decode.tokens, decode.token_gap = 1_000_000, 0.01
            body = {"model": "tiny", "prompt": PROMPT, "stream": True}
            async with session.post(url + COMPLETIONS, json=body) as answer:
                assert b"t0" in await answer.content.readany()
            await reach(lambda: decode.aborted == 1)  # the client has gone away in the middle

    run(test())


@pytest.mark.parametrize("stage", ["prefill", "deflected", "decode", "held"])
def test_a_client_that_goes_away_is_gone_everywhere(stage: str) -> None:
    async def test() -> None:
        async with fleet() as (proxy, url, [prefill], [decode]), aiohttp.ClientSession() as session:
            if stage != "deflected":
                prefer_prefill(decode)
            else:
                prefill.queue(("x", 50_000, 0))
            if stage == "held":
                prefill.queue(("x", 2048, 0), ("y", 9, 0))
            await settled(proxy, prefill, decode)
            waiting = prefill if stage == "prefill" else decode
            waiting.gate.clear()
            task = asyncio.ensure_future(send(session, url))
            if stage == "held":
                await reach(lambda: proxy.dispatcher.held() == 1)
            else:
                await reach(lambda: waiting.bodies)
            task.cancel()
            await reach(lambda: all(node.unfinished == 0 for node in proxy.nodes))
            await reach(lambda: proxy.dispatcher.held() == 0)
            if stage == "held":
                assert prefill.bodies == decode.bodies == []
            else:
                await reach(lambda: waiting.aborted == 1)
            await reach(lambda: 'outcome="client_gone"} 1.0' in proxy.records.page(0, 0.0).decode())

    run(test())


@pytest.mark.parametrize("how", ["status", "broken", "dead", "stream", "error_event"])
def test_retried_once_on_another_node(how: str) -> None:
    async def test() -> None:
        stream = how in ("stream", "error_event")
        async with fleet(0 + 1, 2, health_interval=60.0) as (proxy, url, [prefill], decode):
            prefill.queue(("x", 50_000, 0))
            decode[1].report = make_report(n_decode=1)  # the first one looks better
            await settled(proxy, prefill, *decode)
            if how == "status":
                decode[0].status = 500
            elif how == "dead":
                await decode[0].stop()
            elif how == "error_event":
                decode[0].error_event = True
            else:
                decode[0].drop_after = 0
            status, answer = await post(url, stream=stream)
            assert status == 200
            assert "t0" in (answer if stream else answer["choices"][0]["text"])
            assert len(decode[1].bodies) == 1
            first, second = proxy.records.recent()
            assert (first.node, second.node) == (decode[0].url, decode[1].url)
            assert first.outcome == "Unanswered"
            assert first.request != second.request
            assert [node.unfinished for node in proxy.nodes] == [0, 0, 0]

    run(test())


def test_two_failures_are_a_clear_503() -> None:
    async def test() -> None:
        async with fleet(1, 3) as (proxy, url, [prefill], decode):
            prefill.queue(("x", 50_000, 0))
            await settled(proxy, prefill)
            for node in decode:
                node.status = 500
            status, answer = await post(url)
            assert status == 503
            assert answer["error"]["code"] == 503
            assert decode[0].url in answer["error"]["message"]
            assert sum(len(node.bodies) for node in decode) == 2  # not a third time

    run(test())


def test_a_failed_prefill_node_is_left_out_and_the_request_done_again() -> None:
    async def test() -> None:
        async with fleet(2, 1) as (proxy, url, prefill, [decode]):
            prefer_prefill(decode)
            await settled(proxy, decode)
            prefill[0].status = 503
            status, _ = await post(url)
            assert status == 200
            assert (len(prefill[0].bodies), len(prefill[1].bodies), len(decode.bodies)) == (1, 1, 1)

    run(test())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_refusal_is_passed_on_and_not_retried(role: str) -> None:
    async def test() -> None:
        async with fleet(2, 2) as (proxy, url, prefill, decode):
            if role == "prefill":
                prefer_prefill(*decode)
            await settled(proxy, *decode)
            for node in (*prefill, *decode):
                node.status = 422
            status, answer = await post(url)
            nodes = prefill if role == "prefill" else [*prefill, *decode]
            assert (status, sum(len(node.bodies) for node in nodes)) == (422, 1)
            assert answer["error"]["message"].startswith("from ")

    run(test())


def test_once_tokens_were_sent_an_error_ends_the_stream_and_nothing_is_retried() -> None:
    async def test() -> None:
        async with fleet(1, 2) as (_, url, _, decode):
            for node in decode:
                node.drop_after = 2
            status, text = await post(url, stream=True)
            events = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
            assert status == 200
            assert [json.loads(event)["choices"][0]["text"] for event in events[:2]] == ["t0 ", "t1 "]
            assert json.loads(events[2])["error"]["code"] == 502
            assert "[DONE]" not in text
            assert sum(len(node.bodies) for node in decode) == 1

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_node_that_freezes_is_given_up_when_its_health_is_silent(stream: bool) -> None:
    async def test() -> None:
        async with fleet(1, 2) as (proxy, url, [prefill], decode):
            prefill.queue(("x", 50_000, 0))
            decode[1].report = make_report(n_decode=1)
            await settled(proxy, prefill, *decode)
            decode[0].gate.clear()
            task = asyncio.ensure_future(post(url, stream=stream))
            await reach(lambda: decode[0].bodies)
            decode[0].healthy = False
            status, _ = await task
            assert status == 200
            assert len(decode[1].bodies) == 1

    run(test())


def test_a_node_lost_in_the_middle_of_a_stream_is_told_in_it() -> None:
    async def test() -> None:
        async with fleet(1, 1) as (_, url, _, [decode]), aiohttp.ClientSession() as session:
            decode.tokens, decode.token_gap = 1_000_000, 0.01
            body = {"model": "tiny", "prompt": PROMPT, "stream": True}
            async with session.post(url + COMPLETIONS, json=body) as answer:
                await answer.content.readany()
                decode.healthy = False
                text = await answer.text()
            assert json.loads(text.strip().rsplit("data: ", 1)[1])["error"]["type"] == "upstream_error"

    run(test())


def test_a_silent_node_times_out() -> None:
    async def test() -> None:
        async with fleet(1, 2, timeout=0.3) as (proxy, url, [prefill], decode):
            prefill.queue(("x", 50_000, 0))
            decode[1].report = make_report(n_decode=1)
            await settled(proxy, prefill, *decode)
            decode[0].gate.clear()
            status, _ = await post(url)
            assert (status, len(decode[1].bodies)) == (200, 1)

    run(test())


def test_a_dead_node_is_left_out_and_comes_back() -> None:
    async def test() -> None:
        async with fleet(1, 1) as (proxy, url, [prefill], [decode]):
            prefer_prefill(decode)
            await settled(proxy, decode)
            await prefill.stop()
            await reach(lambda: not proxy.prefill[0].alive)
            status, _ = await post(url)  # better late on the decode node than never
            assert (status, decode.bodies[-1]["vllm_xargs"]["gimbal_chunks"]) == (200, [8])
            assert json.loads((await get(f"{url}/health"))[1])["nodes"][prefill.url]["alive"] is False
            await prefill.restart()
            await reach(lambda: proxy.prefill[0].report is not None)
            await post(url)
            assert len(prefill.bodies) == 1
            await decode.stop()
            await reach(lambda: not proxy.decode[0].alive)
            status, answer = await post(url)
            assert (status, answer["error"]["type"]) == (503, "service_unavailable")
            assert (await get(f"{url}/health"))[0] == 503
            assert (await get(f"{url}/v1/models"))[0] == 503

    run(test())


def test_without_prefill_nodes_requests_take_turns_on_the_decode_node() -> None:
    async def test() -> None:
        async with fleet(1, 1) as (proxy, url, [prefill], [decode]):
            await prefill.stop()
            await reach(lambda: not proxy.prefill[0].alive)
            decode.gate.clear()
            tasks = [asyncio.ensure_future(post(url)) for _ in range(6)]
            await reach(lambda: len(decode.bodies) == 1 and proxy.dispatcher.held() == 5)
            await asyncio.sleep(0.1)
            assert len(decode.bodies) == 1  # one deflected prompt at a time
            decode.gate.set()
            assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 6

    run(test())


def test_a_request_that_nobody_can_take_in_time_is_a_503() -> None:
    async def test() -> None:
        async with fleet(1, 1, hold_timeout=0.1) as (proxy, url, [prefill], [decode]):
            decode.report = make_report(model=UNFITTED)
            await settled(proxy, decode)
            await prefill.stop()
            await reach(lambda: not proxy.prefill[0].alive)
            status, answer = await post(url)
            assert (status, decode.bodies) == (503, [])
            assert "in time" in answer["error"]["message"]
            assert proxy.dispatcher.held() == 0

    run(test())


@pytest.mark.parametrize(
    "body",
    [
        None,  # no statistics
        {"engines": []},
        {"engines": [make_report().to_wire()] * 2},  # several engines: nobody knows which one it would be
        {"engines": [make_report().to_wire() | {"n_decode": None}]},
        {"engines": [make_report(limits_chunks=False).to_wire()]},
        {"engines": [make_report(kv_free=None).to_wire()]},
        {"engines": [make_report(model=UNFITTED).to_wire()]},
        ["nonsense"],
    ],
)
def test_a_missing_figure_is_not_zero(body: Any) -> None:
    async def test() -> None:
        async with fleet(1, 1, settle=False) as (proxy, url, [prefill], [decode]):
            decode.report, decode.report_body = None, body
            prefill.queue(("x", 50_000, 0))
            await settled(proxy, prefill)
            await reach(lambda: proxy.decode[0].alive)
            proxy.decode[0].report = None
            await asyncio.sleep(0.1)
            status, _ = await post(url)
            # Ever so much is queued there, and still it is the only one that is known.
            assert (status, len(prefill.bodies)) == (200, 1)
            assert "gimbal_chunks" not in decode.bodies[0]["vllm_xargs"]

    run(test())


def test_without_any_figure_prefill_nodes_take_turns() -> None:
    async def test() -> None:
        async with fleet(3, 1, settle=False) as (proxy, url, prefill, [decode]):
            for node in (*prefill, decode):
                node.report = None
            for node in proxy.nodes:
                node.report = None
            await asyncio.sleep(0.1)
            for _ in range(6):
                assert (await post(url))[0] == 200
            assert [len(node.bodies) for node in prefill] == [2, 2, 2]
            assert {record.reason for record in proxy.records.recent()} == {"in_order"}

    run(test())


def test_a_prompt_that_cannot_be_counted_is_never_deflected() -> None:
    async def test() -> None:
        async with fleet(2, 1) as (proxy, url, prefill, [decode]):
            for node in (*prefill, decode):
                node.tokenizes = False
            for _ in range(4):
                assert (await post(url))[0] == 200
            assert [len(node.bodies) for node in prefill] == [2, 2]
            assert {record.reason for record in proxy.records.recent()} == {"unknown_length"}

    run(test())


@pytest.mark.parametrize(
    "body", [{"n": 2}, {"best_of": 3}, {"prompt": ["a b", "c"]}, {"prompt": [[1, 2], [3]]}]
)
def test_several_prompts_or_answers_are_not_deflected(body: dict[str, Any]) -> None:
    async def test() -> None:
        async with fleet() as (proxy, url, [prefill], _):
            prefill.queue(("x", 1_000, 0))
            await settled(proxy, prefill)
            assert (await post(url, **body))[0] == 200
            assert len(prefill.bodies) == 1

    run(test())


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe"])
def test_a_body_that_is_no_object_is_a_400(data: bytes) -> None:
    async def test() -> None:
        async with (
            fleet() as (_, url, _, _),
            aiohttp.ClientSession() as session,
            session.post(url + COMPLETIONS, data=data) as answer,
        ):
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "invalid_request_error"

    run(test())


def test_the_strictest_limit_of_a_request_reaches_the_node() -> None:
    async def test() -> None:
        async with fleet(tbt_slo=0.5) as (_, url, _, [decode]):
            await post(url)
            await post(url, vllm_xargs={"gimbal_tbt_slo": 0.25})
            await post(url, vllm_xargs={"gimbal_tbt_slo": "soon"})
            sent = [body["vllm_xargs"]["gimbal_tbt_slo"] for body in decode.bodies]
            assert sent == [0.5, 0.25, 0.5]

    run(test())


def test_time_to_first_token_is_split_by_what_the_nodes_measured() -> None:
    async def test() -> None:
        async with fleet(bandwidth=None) as (proxy, url, [prefill], [decode]):
            decode.report = make_report(model=None)
            await settled(proxy, decode)
            assert (await post(url))[0] == 200
            [record] = proxy.records.recent()
            assert proxy.link.bandwidth is None
            prefill.completed((record.request, 0.25, 0.4))
            decode.completed((record.request, 0.001, 0.5))
            await reach(lambda: record.queueing is not None)
            assert (record.prefill, record.transfer) == (0.25, 0.5)
            assert record.ttft == pytest.approx(record.queueing + 0.75, abs=0.3)
            assert proxy.link.bandwidth == pytest.approx(8 * 1000.0 / 0.5)
            page = (await get(f"{url}/metrics"))[1]
            assert 'gimbal_route_ttft_seconds_sum{part="transfer"} 0.5' in page
            assert 'gimbal_route_requests_total{outcome="answered"} 1.0' in page
            assert f'gimbal_route_node_up{{node="{decode.url}",role="decode"}} 1.0' in page

    run(test())


def test_a_burst_spreads_before_any_node_has_reported_it() -> None:
    async def test() -> None:
        async with fleet(2, 1, deflect=False) as (_, url, prefill, _), aiohttp.ClientSession() as session:
            for node in prefill:
                node.gate.clear()
            tasks = [asyncio.ensure_future(send(session, url)) for _ in range(20)]
            await reach(lambda: sum(len(node.bodies) for node in prefill) == 20)
            for node in prefill:
                node.gate.set()
            assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 20
            assert [len(node.bodies) for node in prefill] == [10, 10]

    run(test())


def test_models_and_unknown_paths() -> None:
    async def test() -> None:
        async with fleet() as (_, url, _, _):
            status, text = await get(f"{url}/v1/models")
            assert (status, json.loads(text)["data"][0]["id"]) == (200, "tiny")
            assert (await get(f"{url}/v1/embeddings"))[0] == 404
            assert (await get(f"{url}/debug/decisions?count=x"))[0] == 400

    run(test())


def test_the_given_model_is_believed() -> None:
    assert MODEL.good
    assert not UNFITTED.good
