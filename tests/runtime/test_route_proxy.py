"""`gimbal route` in front of fake servers: every way in which a request can go."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

import aiohttp
from gimbal_runtime.tools.errors import RunError
from gimbal_runtime.tools.route_proxy import CHAT, COMPLETIONS
from gimbal_runtime.tools.route_warmup import warm_up_all
from route_fakes import (
    MODEL,
    PROMPT,
    UNFITTED,
    fleet,
    get,
    make_report,
    post,
    prefer_prefill,
    reach,
    run,
    send,
    settled,
)


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
            assert record["counting"] >= 0.0

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


@pytest.mark.parametrize("kind", ["application/json; charset=nothing", "text/plain"])
@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a": ' * 100_000])
def test_a_body_that_cannot_be_read_is_a_400_too(kind: str, data: bytes) -> None:
    async def test() -> None:
        async with (
            fleet() as (_, url, _, _),
            aiohttp.ClientSession(headers={"Content-Type": kind}) as session,
            session.post(url + COMPLETIONS, data=data) as answer,
        ):
            assert answer.status == 400

    run(test())


def test_a_client_does_not_say_what_the_router_decides() -> None:
    async def test() -> None:
        async with fleet() as (proxy, url, [prefill], [decode]):
            claims = {"gimbal_chunks": [1], "gimbal_beta": 9.0, "gimbal_transferred": 1, "other": "kept"}
            prefill.queue(("x", 50_000, 0))
            await settled(proxy, prefill)
            assert (await post(url, vllm_xargs=claims))[0] == 200
            deflected = decode.bodies[-1]["vllm_xargs"]
            assert deflected == {
                "gimbal_request": deflected["gimbal_request"],
                "gimbal_chunks": [8],
                "gimbal_beta": 1.0,
                "other": "kept",
            }
            prefill.report = make_report()
            prefer_prefill(decode)
            await settled(proxy, prefill, decode)
            assert (await post(url, vllm_xargs=claims))[0] == 200
            assert set(prefill.bodies[-1]["vllm_xargs"]) == {"gimbal_request", "other"}
            assert set(decode.bodies[-1]["vllm_xargs"]) == {"gimbal_request", "gimbal_transferred", "other"}

    run(test())


def test_a_limit_that_is_no_number_of_seconds_is_none() -> None:
    async def test() -> None:
        async with fleet(deflect=False, tbt_slo=0.5) as (_, url, [prefill], _):
            for asked in (float("inf"), float("nan"), 10**400, -1, True, "1"):
                assert (await post(url, vllm_xargs={"gimbal_tbt_slo": asked}))[0] == 200
            assert [body["vllm_xargs"]["gimbal_tbt_slo"] for body in prefill.bodies] == [0.5] * 6

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


def test_warm_up_sends_prompts_of_many_lengths_that_share_no_beginning() -> None:
    async def test() -> None:
        async with fleet() as (proxy, _, [prefill], [decode]):
            await warm_up_all(proxy.nodes, 24)
            for node, tokens in ((prefill, 1), (decode, 16)):
                prompts = [body["prompt"] for body in node.bodies]
                assert len(prompts) == 24
                assert len({tuple(prompt[:2]) for prompt in prompts}) == 24
                lengths = [len(prompt) for prompt in prompts]
                assert min(lengths) < 100 < 1000 < max(lengths) < 2048 - tokens
                assert {body["max_tokens"] for body in node.bodies} == {tokens}
            decode.status = 400
            with pytest.raises(RunError, match=decode.url):
                await warm_up_all(proxy.nodes, 1)
            decode.models_status = 401
            with pytest.raises(RunError, match=f"{decode.url} answers 401"):
                await warm_up_all(proxy.nodes, 1)

    run(test())
