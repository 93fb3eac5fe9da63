"""Engine choice on an API server: affinity keys, uncached tokens, engines that come and go, the debug endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import MODEL, Client, wait_until
from .test_trace_path import make_config, make_request, make_row

pytest.importorskip("vllm", reason="vLLM is not installed")

from gimbal_runtime.tools.server import VllmServer
from gimbal_runtime.vllm import debug_endpoint, engine_choice
from gimbal_runtime.vllm.engine_choice import EngineChoice
from gimbal_runtime.vllm.request_key import affinity_key

from .test_trace_path import own_registry  # noqa: F401  # a fixture for every test here


def extra(**arguments: Any) -> Any:
    return SimpleNamespace(extra_args=arguments)


# --- affinity keys ---


def test_the_first_of_key_session_salt_and_prefix_counts() -> None:
    fields = {
        "sampling_params": extra(gimbal_affinity_key="k"),
        "session_id": "s",
        "cache_salt": "c",
        "prompt_token_ids": list(range(300)),
    }
    assert affinity_key(make_request("a", **fields), "prefix") == ("key", "k")
    fields["sampling_params"] = extra(other=1)
    assert affinity_key(make_request("a", **fields), "prefix") == ("session", "s")
    fields["session_id"] = None
    assert affinity_key(make_request("a", **fields), "session") == ("salt", "c")
    fields["cache_salt"] = None
    assert affinity_key(make_request("a", **fields), "session") is None
    first = affinity_key(make_request("a", **fields), "prefix")
    fields["prompt_token_ids"] = [*range(256), 7, 7, 7]
    assert affinity_key(make_request("b", **fields), "prefix") == first is not None
    fields["prompt_token_ids"] = [7, *range(1, 300)]
    assert affinity_key(make_request("c", **fields), "prefix") != first
    assert affinity_key(make_request("d"), "prefix") is None  # shorter than 256 tokens


def test_off_is_off_and_a_strange_key_is_one_too() -> None:
    request = make_request("a", sampling_params=extra(gimbal_affinity_key=["a", 1]), session_id="s")
    assert affinity_key(request, "off") is None
    assert hash(affinity_key(request, "session")) is not None


@pytest.mark.parametrize("name", ["gimbal_affinity_key", "session_id", "cache_salt"])
def test_a_long_key_is_kept_by_its_hash(name: str) -> None:
    def key(text: str) -> Any:
        fields: dict[str, Any] = {"sampling_params": extra(), "session_id": None, "cache_salt": None}
        fields |= {"sampling_params": extra(**{name: text})} if name.startswith("gimbal") else {name: text}
        return affinity_key(make_request("a", **fields), "session")

    assert isinstance(key("x" * 128)[1], str)
    assert isinstance(key("x" * 129)[1], int)
    assert key("x" * 129) == key("x" * 129) != key("x" * 130)


def test_adapters_do_not_share_a_prefix() -> None:
    tokens = list(range(300))
    keys = [
        affinity_key(make_request("a", prompt_token_ids=tokens, lora_request=lora), "prefix")
        for lora in (None, SimpleNamespace(lora_name="x"), SimpleNamespace(lora_name="y"))
    ]
    assert len(set(keys)) == 3


def test_sessions_stay_together_while_scores_are_close() -> None:
    choice = EngineChoice(make_config(), [0, 1], client_index=0)
    choice.observe([make_row(1), make_row(1)])
    engines: dict[str, set[int]] = {}
    for turn in range(4):
        for session in "abcd":
            request = make_request(f"{session}{turn}", 1, session_id=session)
            engines.setdefault(session, set()).add(choice.choose(request, None).engine)
    assert [len(found) for found in engines.values()] == [1, 1, 1, 1]
    assert set.union(*engines.values()) == {0, 1}
    assert choice.selector.decisions.counts == {"close": 4, "affinity": 12}


# --- uncached tokens ---


def test_a_prompt_sent_before_counts_by_what_is_new_in_it() -> None:
    choice = EngineChoice(make_config(prefix_caching=True), [0, 1], client_index=0)
    tokens = list(range(1_000))
    choice.choose(make_request("a", prompt_token_ids=tokens), 0)
    assert choice.selector.compensation(0) == 1_000
    choice.choose(make_request("b", prompt_token_ids=[*tokens, 1, 2, 3]), 0)
    assert choice.selector.compensation(0) == 1_000 + 1_003 - 960  # 15 blocks of 64 tokens
    choice.choose(make_request("c", prompt_token_ids=tokens), 1)
    assert choice.selector.compensation(1) == 1_000
    choice.choose(make_request("d", prompt_token_ids=tokens, cache_salt="x"), 1)
    assert choice.selector.compensation(1) == 2_000


@pytest.mark.parametrize(
    "fields",
    [
        {"mm_features": ["an image"]},
        {"sampling_params": SimpleNamespace(extra_args=None, skip_reading_prefix_cache=True)},
    ],
)
def test_prompts_that_are_not_read_from_the_cache_count_as_a_whole(fields: dict[str, Any]) -> None:
    choice = EngineChoice(make_config(prefix_caching=True), [0, 1], client_index=0)
    for name in "ab":
        choice.choose(make_request(name, 640, **fields), 0)
    assert choice.selector.compensation(0) == 1_280


def test_without_prefix_caching_there_is_no_estimate() -> None:
    choice = EngineChoice(make_config(), [0, 1], client_index=0)
    for name in "ab":
        choice.choose(make_request(name, 640), 0)
    assert choice.selector.compensation(0) == 1_280


# --- engines that come and go ---


def client_of(choice: EngineChoice, engines: int) -> Any:
    return SimpleNamespace(core_engines=list(range(engines)), reqs_in_flight={}, _gimbal_choice=choice)


def send(client: Any, name: str, **fields: Any) -> int:
    """The engine to which vLLM's own method is told to send the request."""
    request = make_request(name, data_parallel_rank=None, **fields)
    return engine_choice._choose(
        client, client._gimbal_choice, request, lambda _, r: r.data_parallel_rank, lambda *_: None
    )


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_elastic_scaling_removes_and_adds_engines(prefix_caching: bool) -> None:
    choice = EngineChoice(make_config(prefix_caching=prefix_caching), [0, 1, 2], client_index=0)
    choice.observe([make_row(7, acks={0: 9})] * 3)
    client = client_of(choice, 3)
    assert {send(client, f"a{i}") for i in range(3)} == {0, 1, 2}
    client.core_engines = [0, 1]
    assert [send(client, f"b{i}") for i in range(4)] == [0, 1, 0, 1]
    assert choice.selector.compensation(2) == 0
    client.core_engines = [0, 1, 2, 3]
    assert {send(client, f"c{i}") for i in range(4)} == {0, 1, 2, 3}
    choice.observe([make_row(8, acks={0: 99}), make_row(8), make_row(1), make_row(1)])
    assert choice.selector.select(1, now=engine_choice.time.monotonic()).reason in ("close", "score")
    choice.release_all([f"{wave}{i}" for wave in "abc" for i in range(4)])
    choice.selector.release(0, choice.selector.decisions.recent(1)[0].seq)
    assert not choice.fuse.blown


def test_a_session_on_an_engine_that_is_gone_is_vllms_to_answer() -> None:
    choice = EngineChoice(make_config(), [0, 1], client_index=0)
    client = client_of(choice, 2)
    client.core_engines = [0]
    client.reqs_in_flight["a"] = 1
    request = make_request("a", data_parallel_rank=None)
    assert engine_choice._choose(client, choice, request, lambda *_: "stock", lambda *_: None) == "stock"
    assert choice.selector.compensation(0) == 0


# --- the debug endpoint ---


class App:
    """Keeps the routes that are added."""

    def __init__(self) -> None:
        self.routes: dict[str, Any] = {}

    def add_api_route(self, path: str, handler: Any, **_: Any) -> None:
        self.routes[path] = handler


def test_the_route_shows_the_last_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.launchers import app as launcher

    stock: list[Any] = []
    monkeypatch.setattr(
        launcher, "register_api_routers", lambda args, app, tasks, model=None: stock.append(app)
    )
    choice = EngineChoice(make_config(), [2, 3], client_index=1, clients=2)
    debug_endpoint.serve(choice.state, strict=True)
    app = App()
    launcher.register_api_routers(None, app, ())
    assert stock == [app]
    for name in "abc":
        choice.choose(make_request(name), None)
    handler = app.routes["/gimbal/decisions"]
    with pytest.raises(StopIteration) as ended:
        handler(2).send(None)
    shown = json.loads(json.dumps(ended.value.value))
    assert [entry["engine"] for entry in shown["recent"]] == [3, 2]
    assert shown["reasons"] == {"ordered_no_trace": 3}
    assert [(e["engine"], e["live"], e["trace_age"], e["compensation"]) for e in shown["engines"]] == [
        (2, True, None, 200),
        (3, True, None, 100),
    ]
    assert (shown["client"], shown["clients"], shown["active"]) == (1, 2, True)


def test_another_vllm_gets_no_route_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.launchers import app as launcher

    def other(application: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(launcher, "register_api_routers", other)
    warnings: list[str] = []
    monkeypatch.setattr(debug_endpoint.logger, "warning", warnings.append)
    debug_endpoint.serve(lambda last: {}, strict=False)
    assert launcher.register_api_routers is other
    assert len(warnings) == 1
    assert "debug-endpoint" in warnings[0]
    with pytest.raises(RuntimeError, match="debug-endpoint"):
        debug_endpoint.serve(lambda last: {}, strict=True)


# --- a real server ---


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("choice") / "server.log"
    # A wide margin: what is measured is that keys are followed, not how close two idle engines' scores are.
    env = {"GIMBAL_CLOSE": "1.0", "GIMBAL_STRICT": "1"}
    with VllmServer(MODEL, "dp", eplb=False, env=env, log_path=log) as server:
        yield server


@pytest.mark.vllm
@pytest.mark.slow
def test_keys_and_reasons_on_a_real_server(server: VllmServer) -> None:
    client = Client(server.url)
    client.complete("warm", 2)
    assert wait_until(lambda: all(e["trace_age"] is not None for e in client.debug()["engines"]), 10.0)
    for i in range(6):
        client.complete(f"say {i}", 2, more={"vllm_xargs": {"gimbal_affinity_key": "one"}})
        client.complete(f"tell {i}", 2, more={"cache_salt": "two"})
    shown = client.debug()
    assert shown["mode"] == "dp"
    assert shown["active"]
    assert shown["reasons"]["affinity"] >= 10
    recent = shown["recent"][-12:]
    assert len({entry["engine"] for entry in recent[0::2]}) == 1
    assert len({entry["engine"] for entry in recent[1::2]}) == 1
    decisions = "gimbal_engine_decisions_total"
    counted = {name: n for name, n in client.metrics().items() if name.startswith(decisions)}
    by_reason = sum(n for name, n in counted.items() if 'reason="affinity"' in name)
    assert by_reason == shown["reasons"]["affinity"]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_repeated_prompt_counts_once_on_a_real_server(server: VllmServer) -> None:
    client = Client(server.url)
    prompt = list(range(100, 740))
    for _ in range(2):
        client.complete(prompt, 2, engine=0)
    first, second = client.debug()["recent"][-2:]
    assert (first["engine"], second["engine"]) == (0, 0)
    assert first["tokens"] == 640
    assert 0 < second["tokens"] < first["tokens"]
