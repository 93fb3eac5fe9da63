"""The tables in docs/simulator.md are those of the results file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"bench/simulate/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_table_is_replaced_and_the_other_kept() -> None:
    merged = load("run").merged
    first = merged({}, {"engines": [1], "verdict": [2], "skipped": [], "deflection": [3]}, {"commit": "a"})
    assert first["runs"] == {"engines": {"commit": "a"}, "deflection": {"commit": "a"}}
    second = merged(first, {"skipped": ["azure"], "deflection": [4]}, {"commit": "b"})
    assert second["runs"] == {"engines": {"commit": "a"}, "deflection": {"commit": "b"}}
    assert (second["engines"], second["verdict"], second["deflection"]) == ([1], [2], [4])
    assert second["skipped"] == []
    assert merged(second, {"skipped": ["azure"], "engines": [5], "verdict": []}, {})["engines"] == [5]


def test_tables_are_made_from_the_results() -> None:
    table = load("table")
    result = json.loads(table.RESULTS.read_text())
    text = (ROOT / "docs/simulator.md").read_text()
    lines = table.engines_table(result) + table.deflection_table(result)
    assert len(lines) == 2 + 24 + 2 + 45
    assert [line for line in lines if line not in text] == []


def test_what_the_docs_say_of_the_rows() -> None:
    result = json.loads((ROOT / "bench/results/simulate.json").read_text())
    assert all(entry["over_best"] <= 1.02 for entry in result["verdict"])
    azure = [entry for entry in result["verdict"] if entry["traffic"] == "azure"]
    assert all(0.6 <= entry["over_best"] <= 0.77 for entry in azure)
    last = [entry for entry in result["verdict"] if entry["last_in"]]
    assert len(last) == 6
    assert {column for entry in last for column in entry["last_in"]} == {"tpot_mean"}
    p95 = {(r["shape"], r["load"], r["deflection"]): r for r in result["deflection"]}
    for shape, load in [("2P2D", 0.8), ("2P2D", 0.95), ("1P3D", 0.8), ("1P3D", 0.95)]:
        with_, without = (p95[shape, load, mode] for mode in ("also while waiting", "none"))
        assert with_["ttft_p95"] <= 0.4 * without["ttft_p95"]
        assert with_["late_tokens"] <= without["late_tokens"] + 5e-6
    for load, share in ((0.8, 0.43), (0.95, 0.48)):
        ordered, without = (p95["3P1D", load, m] for m in ("also while waiting, shortest first", "none"))
        assert ordered["ttft_p95"] <= share * without["ttft_p95"]
        assert p95["3P1D", load, "also while waiting"]["ttft_p95"] > 0.6 * without["ttft_p95"]
    for (shape, load, mode), row in p95.items():
        if mode == "also while waiting, shortest first":
            assert row["ttft_p99"] < p95[shape, load, "none"]["ttft_p99"]
            assert row["late_tokens"] <= p95[shape, load, "none"]["late_tokens"] + 5e-6


def test_the_engine_choice_page_has_the_figures_of_the_simulated_bench() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "simulate-serving.json").read_text())["changes"]
    percent = {
        row["policy"]: {name: f"{100 * row[name]:+.0f}" for name in ("ttft_mean", "ttft_p99", "tpot_mean")}
        for row in rows
        if (row["setting"], row["load"]) == ("token-bound", 1.4)
    }
    dp, auto, choice = percent["dp"], percent["dp, age limit auto"], percent["choice only"]
    text = " ".join((ROOT / "docs" / "engine-choice.md").read_text().split())
    assert f"{dp['ttft_mean']} % in the mean and {dp['ttft_p99']} % in P99" in text
    assert f"{auto['ttft_mean']} and {auto['ttft_p99']} % with `auto`" in text
    assert f"{choice['ttft_mean']} and {choice['ttft_p99']} % by engine choice alone" in text
    assert f"{dp['tpot_mean']} % time per token" in text
