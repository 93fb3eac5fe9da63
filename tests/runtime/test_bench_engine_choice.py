"""bench/serving/engine_choice*.py: figures from samples, paired changes, tables, resuming. No server is started."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gimbal_runtime.tools.errors import InputError
from gimbal_runtime.tools.replay import Record
from gimbal_runtime.tools.scrape import Snapshot, parse

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "serving"
MODULES = ("engine_choice_measure", "engine_choice_table", "engine_choice")


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The scripts import each other by name, as they do when they are run."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))
    for name in MODULES:
        sys.modules.pop(name, None)


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def record(name: str, ttft: float | None, tpot: float | None = 0.05, status: int = 200) -> Record:
    return Record(name, 0.0, status, token_ids=(1, 2), ttft=ttft, tpot=tpot)


def run(variant: str, repetition: int, ttft: float, **more: Any) -> dict[str, Any]:
    row = {
        "setting": "token-bound",
        "variant": variant,
        "repetition": repetition,
        "rate": 25.0,
        "seconds": 9.0,
    }
    figures = {
        "ttft_mean": ttft,
        "ttft_p50": ttft,
        "ttft_p99": 3 * ttft,
        "tpot_mean": 0.06,
        "throughput": 20.0,
    }
    return {**row, **figures, "attainment": 0.5, "running": 8.0, "prompt_throughput_gap": 100.0, **more}


def test_engines_are_sampled_by_label() -> None:
    measure = load("engine_choice_measure")
    page = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 40.0
"""
    seen = measure.sample(parse(page), 7.0)
    assert (seen.time, dict(seen.running), dict(seen.prompt_tokens)) == (
        7.0,
        {"0": 3.0, "1": 5.0},
        {"0": 100.0, "1": 40.0},
    )


def test_the_gap_of_prompt_throughput_is_taken_over_whole_windows() -> None:
    measure = load("engine_choice_measure")
    tokens = {0.0: (0, 0), 0.5: (500, 0), 1.0: (1_000, 0), 1.5: (1_000, 0), 2.0: (1_000, 400)}
    samples = [measure.Sample(t, {"0": 2.0, "1": 4.0}, {"0": a, "1": b}) for t, (a, b) in tokens.items()]
    found = measure.engine_figures(samples)
    assert found["running_per_engine"] == {"0": 2.0, "1": 4.0}
    assert found["running"] == 3.0
    assert found["prompt_throughput_gap"] == pytest.approx((1_000 + 400) / 2)
    assert measure.engine_figures(samples[:2])["prompt_throughput_gap"] is None
    assert measure.engine_figures([])["running"] is None


def test_attainment_asks_for_both_limits_and_for_an_answer() -> None:
    measure = load("engine_choice_measure")
    records = [
        record("a", 0.4),
        record("b", 0.6),
        record("c", 0.4, tpot=0.2),
        record("d", 0.4, tpot=None),
        record("e", None, status=503),
    ]
    assert measure.attainment(records, ttft=0.5, tpot=0.1) == pytest.approx(2 / 5)
    row = measure.figures(records, 10.0, [], Snapshot({}), {"ttft": 0.5, "tpot": 0.1})
    assert (row["finished"], row["throughput"], row["decisions"]) == (4, 0.4, {})


def test_changes_are_paired_by_repetition() -> None:
    table = load("engine_choice_table")
    base = [run("off", 0, 1.0), run("off", 1, 4.0)]
    own = [
        run("dp", 1, 2.0),
        run("dp", 0, 0.9),
        run("dp", 2, 9.0),
    ]  # the third has nothing to be compared with
    assert table.paired_changes(own, base, "ttft_mean") == pytest.approx([-0.5, -0.1])
    lines = table.changes_table({"runs": [*base, *own]}, "token-bound")
    # The geometric mean of 0.5 and 0.9 is 0.671; the 97.5 % quantile of t with one degree of freedom is 12.7.
    mean, low, high = (float(part) for part in re.findall(r"[-+]\d+", lines[2].split("|")[2]))
    assert mean == -33
    half = 12.7062 * math.log(0.9 / 0.5) / 2
    assert math.log1p(high / 100) - math.log(0.671) == pytest.approx(half, rel=0.02)
    assert low == -98


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (4, 2.7764), (9, 2.2622)])
def test_the_quantile_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert load("engine_choice_table")._t_quantile(freedom) == pytest.approx(quantile, rel=1e-4)


def test_halved_and_doubled_is_no_change() -> None:
    table = load("engine_choice_table")
    rows = {"runs": [run("off", 0, 1.0), run("off", 1, 1.0), run("dp", 0, 2.0), run("dp", 1, 0.5)]}
    assert table.changes_table(rows, "token-bound")[2].startswith("| dp | +0 % (")


def test_the_table_has_mean_and_spread() -> None:
    table = load("engine_choice_table")
    result = {"runs": [run("off", 0, 1.0), run("off", 1, 3.0), run("dp", 0, 2.0, running=None)]}
    lines = table.figures_table(result, "token-bound")
    assert lines[2].startswith("| off | 2.000 ± 1.414 | 2.000 ± 1.414 | 6.00 ± 4.24 | 60.0 ± 0.0 |")
    assert lines[3].startswith("| dp | 2.000 | 2.000 | 6.00 |")
    assert "| - |" in lines[3]
    assert len(table.tables(result)) == 4 + 1 + 3


def test_results_are_kept_and_taken_up_again(tmp_path: Path) -> None:
    bench, path = load("engine_choice"), tmp_path / "r.json"
    parameters = {"requests": 4, "rate": None, "load": 1.4, "seed": 1}
    store = bench.Store(path, parameters)
    store.add(run("off", 0, 1.0))
    again = bench.Store(path, parameters)
    assert again.has("token-bound", "off", 0)
    assert not again.has("token-bound", "off", 1)
    assert not again.has("slot-bound", "off", 0)
    assert json.loads(path.read_text())["seconds"] == 9.0
    with pytest.raises(InputError, match=r"--json: .*valid: these parameters"):
        bench.Store(path, parameters | {"seed": 2})


def make_bench(tmp_path: Path, **more: Any) -> tuple[Any, Any]:
    bench = load("engine_choice")
    store = bench.Store(tmp_path / "r.json", {})
    arguments = {
        "repetitions": 2,
        "first": 0,
        "requests": 4,
        "settings": ["token-bound"],
        "variants": ["off", "dp", "full"],
    }
    arguments |= {"rate": None, "load": 1.4, "seed": 1, "together": 2}
    return bench.Bench(Namespace(**(arguments | more)), store), store


def test_only_what_is_missing_gets_a_server(tmp_path: Path) -> None:
    made, store = make_bench(tmp_path)
    assert list(made._groups("token-bound")) == [["off", "dp"], ["full"]]
    for repetition in (0, 1):
        store.add(run("dp", repetition, 1.0))
    assert list(made._groups("token-bound")) == [["off", "full"]]
    later, _ = make_bench(tmp_path, first=1)
    assert list(later.repetitions) == [1]
    assert list(made._groups("slot-bound")) == [["off", "dp"], ["full"]]


def test_the_offered_rate_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("engine_choice")
    made, store = make_bench(tmp_path)
    monkeypatch.setattr(bench, "_calibrate", lambda *_: 20.0)
    assert made._rate("token-bound", None) == pytest.approx(28.0)
    store.add(run("off", 0, 1.0))
    assert made._rate("token-bound", None) == 25.0
    assert made._rate("slot-bound", None) == pytest.approx(28.0)
    made.arguments.rate = 3.0
    assert made._rate("token-bound", None) == 3.0


def test_variants_take_turns_and_are_compared_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("engine_choice")
    made, store = make_bench(tmp_path, variants=["off", "dp"])
    asked: list[tuple[str, list[str]]] = []

    def measured(server: str, requests: Any, _: Any) -> tuple[dict[str, Any], list[Record]]:
        asked.append((server, [request.name for request in requests]))
        tokens = (9,) if server == "dp" and len(asked) < 3 else (1,)
        records = [Record(r.name, 0.0, 200, token_ids=tokens, ttft=1.0) for r in requests]
        return {"seconds": 1.0, "finished": 4, "ttft_mean": 1.0, "ttft_p99": 1.0, "throughput": 4.0}, records

    monkeypatch.setattr(bench, "_measure", measured)
    servers = {"off": "off", "dp": "dp"}
    for repetition, turn in ((0, ["off", "dp"]), (1, ["dp", "off"])):
        made._run_repetition("token-bound", repetition, turn, servers, 20.0)
    assert [name for name, _ in asked] == ["off", "dp", "dp", "off"]
    assert asked[0][1] == asked[1][1] != asked[2][1] == asked[3][1]
    assert [len(row["different"]) for row in store.result["runs"]] == [0, 4, 0, 0]
    made._run_repetition("token-bound", 1, ["dp", "off"], servers, 20.0)
    assert len(asked) == 4  # all there already


def test_bad_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    bench = load("engine_choice")
    assert bench.main(bench._parser().parse_args(["--requests", "0"])) == 2
    assert "--requests: 0; valid: above 0" in capsys.readouterr().err


def test_the_docs_have_the_tables_of_the_results() -> None:
    table = load("engine_choice_table")
    files = sorted(table.RESULTS.parent.glob("engine-choice*.json"))
    if not files:
        pytest.skip("bench/results/engine-choice.json is not there: run bench/serving/engine_choice.py")
    text = (FOLDER.parents[1] / "docs" / "engine-choice.md").read_text()
    for file in files:
        result = json.loads(file.read_text())
        assert [line for line in table.tables(result) if line not in text] == []
        assert not any(row["different"] for row in result["runs"])
