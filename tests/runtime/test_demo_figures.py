"""Figures of the demo: scraped counters, saved windows, the table, the JSON, the report."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM")

from gimbal_runtime.tools import charts, demo_report, demo_run, demo_table
from gimbal_runtime.tools.demo import DemoSettings
from gimbal_runtime.tools.demo_result import ModeResult
from gimbal_runtime.tools.demo_run import _mode_result
from gimbal_runtime.tools.replay import Record
from gimbal_runtime.tools.scrape import parse
from gimbal_runtime.tools.windows import SavedWindow, WindowFigures, combine, judge, load_windows

PAGE = """# HELP gimbal_experts_moved_total copies
# TYPE gimbal_experts_moved_total counter
gimbal_experts_moved_total {moved}
# TYPE gimbal_engine_decisions_total counter
gimbal_engine_decisions_total{{engine="0",reason="score"}} {a}
gimbal_engine_decisions_total{{engine="1",reason="score"}} {b}
gimbal_engine_decisions_total{{engine="1",reason="kv, \\"full\\""}} 2.0
"""


def test_counters_are_read_by_name_and_label_and_subtracted():
    before = parse(PAGE.format(moved=5, a=1, b=2))
    after = parse(PAGE.format(moved=9, a=4, b=12))
    growth = after.since(before)
    assert growth.total("gimbal_experts_moved_total") == 4
    assert growth.total("gimbal_bytes_moved_total") is None
    reasons = growth.by_label("gimbal_engine_decisions_total", "reason")
    assert reasons == {"score": 13.0, 'kv, "full"': 0.0}
    assert after.since(parse("")).total("gimbal_engine_decisions_total") == 18


def _window(traffic, current, name="window-000001") -> SavedWindow:
    return SavedWindow(name, np.array(traffic, dtype=np.int64), np.array(current, dtype=np.int32))


def test_figures_of_a_window_by_hand():
    # Rank 0 holds experts 0 and 2, rank 1 holds 1 and 3. Local: 10 + 3 of source 0, 6 + 1 of source 1.
    window = _window([[[10, 2, 3, 5], [4, 6, 9, 1]]], [[0, 2, 1, 3]])
    figures = judge(window, ranks=2, sources=2)
    assert figures.picks == 40
    assert figures.remote_share == pytest.approx(20 / 40)
    assert figures.max_over_mean == pytest.approx(26 / 20)


def test_layers_are_weighted_by_picks_and_idle_ones_left_out():
    traffic = [[[30, 0], [0, 0]], [[0, 0], [0, 0]], [[0, 0], [10, 0]]]
    figures = judge(_window(traffic, [[0, 1]] * 3), ranks=2, sources=2)
    assert figures.remote_share == pytest.approx(10 / 40)
    assert figures.max_over_mean == pytest.approx(2.0)


def test_windows_are_weighted_by_picks():
    total = combine([WindowFigures(30, 0.5, 1.0), WindowFigures(10, 0.1, 2.0), WindowFigures(0, None, None)])
    assert total.picks == 40
    assert total.remote_share == pytest.approx(0.4)
    assert total.max_over_mean == pytest.approx(1.25)
    assert combine([]) == WindowFigures(0, None, None)


def test_windows_are_loaded_in_order_without_empty_and_broken_ones(tmp_path):
    traffic, slots = np.ones((1, 2, 4), dtype=np.int64), np.arange(4, dtype=np.int32)[None]
    for number, scale in ((10, 10), (2, 2), (3, 0)):
        np.savez(tmp_path / f"window-{number:06d}.npz", traffic=traffic * scale, current=slots, slots=slots)
    good = (tmp_path / "window-000010.npz").read_bytes()
    (tmp_path / "window-000011.npz").write_bytes(good[: len(good) // 2])
    np.savez(tmp_path / "window-000012.npz", traffic=traffic)
    windows = load_windows(tmp_path)
    assert [w.name for w in windows] == ["window-000002", "window-000010"]
    assert [w.picks for w in windows] == [16, 80]


SETTINGS = DemoSettings(
    model=Path("m"), prompts=Path("p"), modes=("off", "full"), requests=3, rate=30.0, seed=1, sequences=64,
    token_budget=256, window=16, port=None, json=None, report=None, logs=None,
)  # fmt: skip


def _records(scale: float, last: tuple[int, ...] = (7, 8, 9)) -> list[Record]:
    rows = [(0.1, 0.02, (1, 2)), (0.4, None, (3,)), (2.0, 0.05, last)]
    return [
        Record(f"r{i}", 0.1 * i, 200, tokens, 5, scale * ttft, tpot, scale * ttft + 0.1)
        for i, (ttft, tpot, tokens) in enumerate(rows)
    ]


def _result(mode: str, *, windows: int = 3, last: tuple[int, ...] = (7, 8, 9)) -> ModeResult:
    draw = np.random.default_rng(len(mode))
    saved = [
        _window(draw.integers(0, 90, (6, 2, 32)), np.argsort(draw.random((6, 32)), axis=1), f"window-{i:06d}")
        for i in range(windows)
    ]
    growth = parse(PAGE.format(moved=9, a=4, b=12) if mode == "full" else "").since(parse(""))
    return _mode_result(
        mode, _records(1.0 if mode == "off" else 0.5, last), _records(1.0), 2.0, saved, growth
    )


def test_json_has_the_documented_keys_and_null_for_what_a_mode_lacks():
    document = demo_table.as_json(SETTINGS, [_result("off", windows=0), _result("full")], 12.34)
    document = json.loads(json.dumps(document, allow_nan=False))
    assert document["requests"] == 3
    assert set(document["modes"]) == {"off", "full"}
    keys = {
        "identical", "ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "throughput_rps", "remote_pick_share",
        "max_over_mean", "rearrangements", "experts_moved", "decisions",
    }  # fmt: skip
    off, full = document["modes"]["off"], document["modes"]["full"]
    assert set(off) == set(full) == keys
    for name in ("remote_pick_share", "max_over_mean", "rearrangements", "experts_moved", "decisions"):
        assert off[name] is None
    assert full["experts_moved"] == 9
    assert full["decisions"] == {"score": 16, 'kv, "full"': 2}
    assert full["identical"] == 3
    assert full["ttft_mean_s"] == pytest.approx(0.5 * 2.5 / 3)
    assert document["versions"]["python"]


def test_table_has_one_column_per_mode_and_says_what_differs():
    different = _result("full", last=(7, 1, 9))
    lines = demo_table.table([_result("off"), different]).splitlines()
    assert lines[0].split() == ["off", "full"]
    assert any(re.match(r"identical to reference +3 of 3 +2 of 3$", line) for line in lines)
    assert any(re.match(r"decisions: score +- +16$", line) for line in lines)
    assert len({len(line) for line in lines[2:6]}) == 1
    assert demo_table.difference_lines(different, _records(1.0)) == [
        "full: request r2: token 1 of 3 is the first that differs"
    ]


class _Page(HTMLParser):
    """Open tags must close in order; collects tags and attributes."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _check_page(page: str) -> _Page:
    parser = _Page()
    parser.feed(page)
    assert parser.open == []
    for tag, attributes in parser.seen:
        assert tag not in ("script", "link", "img", "iframe", "image")
        assert not {"src", "href", "xlink:href"} & set(attributes)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "://" not in page
    for picture in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        root = ElementTree.fromstring(picture)
        for node in root.iter():
            assert not any(word in value for value in node.attrib.values() for word in ("nan", "inf"))
    return parser


def test_report_is_well_formed_and_needs_no_other_file():
    page = demo_report.page(SETTINGS, [_result("off"), _result("full")])
    parser = _check_page(page)
    assert page.count("<svg") == 2 + 2 + 2 + 4  # loop (wide, narrow), latency, windows, heatmaps
    cells = [attributes for tag, attributes in parser.seen if tag == "title"]
    assert len(cells) == 1 + 4 * 6 * 2 * 32  # the page's title and one per heatmap cell


def test_report_says_so_when_there_is_nothing_to_draw():
    failed = [Record(f"r{i}", 0.0, 500, error="<no>") for i in range(3)]
    nothing = _mode_result("off", failed, _records(1.0), 2.0, [], parse(""))
    page = demo_report.page(SETTINGS, [nothing])
    _check_page(page)
    assert "No request finished" in page
    assert page.count("No traffic window was saved") == 2
    assert 'class="verdict bad"' in page


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5000001], [1.0, 1.02, 1.19], [1, 2, 3], [0.0, 1234.0]])
def test_linear_axes_hold_their_values_and_have_distinct_ticks(values):
    axis = charts.linear_axis("x", values, digits=2)
    assert axis.low <= min(values)
    assert axis.high >= max(values)
    texts = [text for _, text in axis.ticks]
    assert 2 <= len(texts) == len(set(texts)) <= 9


@pytest.mark.parametrize("values", [[0.3], [0.02, 1.7], [1.0, 1.0], [5e-4, 40.0]])
def test_log_axes_hold_their_values(values):
    axis = charts.log_axis("x", values)
    assert 0 < axis.low <= min(values)
    assert axis.high >= max(values)
    assert axis.low < axis.high
    assert axis.place(axis.low) == 0.0
    assert axis.place(axis.high) == 1.0


@pytest.mark.parametrize(("last", "code"), [((7, 8, 9), 0), ((7, 1, 9), 1)])
def test_the_exit_code_tells_whether_answers_are_identical(last, code, tmp_path, monkeypatch, capsys):
    fixtures = Path(__file__).parents[2] / "fixtures"
    settings = replace(
        SETTINGS,
        model=fixtures / "tiny-qwen3-moe",
        prompts=fixtures / "prompts.jsonl",
        json=tmp_path / "demo.json",
        report=tmp_path / "report.html",
    )
    monkeypatch.setattr(demo_run, "run_reference", lambda *_: _records(1.0))
    monkeypatch.setattr(demo_run, "run_mode", lambda _, mode, *__: _result(mode, last=last))
    assert demo_run.run(settings) == code
    printed = capsys.readouterr().out
    assert ("every answer equals the reference" in printed) == (code == 0)
    assert ("off: request r2: token 1 of 3" in printed) == (code == 1)
    _check_page(settings.report.read_text())
    assert json.loads(settings.json.read_text())["modes"]["off"]["identical"] == 3 - code
