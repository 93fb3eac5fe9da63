"""`gimbal report`: the page stands alone, and what it draws are the figures of the placement."""

from __future__ import annotations

import base64
import json
import re
import struct
import xml.etree.ElementTree as ElementTree
import zlib

import numpy as np
import pytest
from gimbal_runtime.cli import main
from gimbal_runtime.tools.html_page import png_uri
from gimbal_runtime.tools.matrix_chart import MOST_ROWS, chosen_layers, source_expert_picture
from traffic_dumps import write_all


@pytest.fixture
def traffic(tmp_path):
    rng = np.random.default_rng(2)
    picks = rng.poisson(200 * np.exp(rng.standard_normal((3, 2, 16))))
    path = tmp_path / "traffic.npz"
    np.savez(path, traffic=picks, current=np.tile(np.arange(16), (3, 1)))
    return path


def pixels_of(uri: str) -> np.ndarray:
    """The picture in a data URI, uint8 [height, width, 3]; only what `png_uri` writes."""
    data = base64.b64decode(uri.split(",", 1)[1])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    return rows[:, 1:].reshape(height, width, 3)


def test_a_picture_comes_back_from_its_png():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert (pixels_of(png_uri(pixels)) == pixels).all()


def test_the_page_stands_alone_and_shows_the_figures(traffic, tmp_path, capsys):
    out, listed = tmp_path / "report.html", tmp_path / "report.json"
    arguments = ["report", str(traffic), "--ranks", "4", "--bound-nodes", "0"]
    assert main([*arguments, "--out", str(out), "--json", str(listed)]) == 0
    assert str(out) in capsys.readouterr().out
    page, result = out.read_text(), json.loads(listed.read_text())
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    for outside in ("http:", "https:", "url(", "@import", "<script"):
        assert outside not in page
    for figure in (
        "Remote picks per layer",
        "Picks per GPU pair, before",
        "Picks per GPU pair, after",
        "Load of each rank over the mean, before",
        "Load of each rank over the mean, after",
        "Source x expert traffic, before",
        "Source x expert traffic, after",
    ):
        assert f"<figcaption>{figure}" in page
    assert f"{result['after']['remote_share']:.1%}" in page
    assert f"{result['gap']['max']:.3%}" in page
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(picture)  # every picture is well-formed


def test_pairs_are_the_picks_of_the_window(traffic, tmp_path):
    out = tmp_path / "report.html"
    assert main(["report", str(traffic), "--ranks", "2", "--method", "stay", "--out", str(out)]) == 0
    page = out.read_text()
    with np.load(traffic) as data:
        picks = data["traffic"].sum(axis=0)
    for source in range(2):
        for rank in range(2):
            count = picks[source, 8 * rank : 8 * rank + 8].sum()
            shown = f"{count / 1e3:.3g}k" if count >= 1e3 else f"{count:.3g}"
            assert f"s{source} (GPU {source}), GPU {rank}: {shown}<" in page


def test_cells_are_sorted_by_use_and_local_shares_counted():
    served = np.array([[[1.0, 3.0, 0.0, 4.0], [0.0, 0.0, 6.0, 2.0]]])  # two sources, two ranks of two slots
    owned = np.array([[True, False], [False, True]])
    picture = source_expert_picture(served, 4, owned, [0], "x")
    first, second = [pixels_of(uri) for uri in re.findall(r'href="([^"]+)"', picture)]
    assert first[0, 0].sum() < first[0, 1].sum()  # 3 picks before 1, darker
    assert (first[1] == 255).all()
    assert second[1, 0].sum() < second[1, 1].sum()  # 6 before 2 although source 0 uses the other one more
    assert re.findall(r">(\d+ %)<", picture) == ["50 %", "100 %"]


def test_layers_that_fit_are_drawn_first_and_last_included():
    assert chosen_layers(3, 2) == [0, 1, 2]
    many = chosen_layers(58, 64)
    assert many[0] == 0
    assert many[-1] == 57
    assert len(many) * 64 <= MOST_ROWS
    assert chosen_layers(5, 1000) == [0]


def test_a_placement_from_a_file_and_one_that_does_not_fit(traffic, tmp_path, capsys):
    placed, out = tmp_path / "placed.npz", tmp_path / "report.html"
    assert main(["place", str(traffic), "--ranks", "4", "--method", "eplb", "--out", str(placed)]) == 0
    common = ["report", str(traffic), "--ranks", "4", "--out", str(out), "--placement"]
    listed = tmp_path / "x.json"
    assert main([*common, str(placed), "--json", str(listed)]) == 0
    with np.load(placed) as data:
        assert json.loads(listed.read_text())["slots"] == data["slots"].tolist()
    assert "method from placed.npz" in out.read_text()
    capsys.readouterr()
    assert main(["report", str(traffic), "--ranks", "8", "--out", str(out), "--placement", str(placed)]) == 2
    assert "placed on 4 ranks; valid: on 8" in capsys.readouterr().err
    np.savez(placed, slots=np.zeros((3, 16), dtype=np.int32))
    for name, message in ((placed, "slots: layer 0 has no slot"), (tmp_path / "none.npz", "valid: an .npz")):
        assert main([*common, str(name)]) == 2
        captured = capsys.readouterr().err
        assert len(captured.strip().splitlines()) == 1
        assert message in captured


def test_a_dump_without_sources_has_no_remote_pictures(tmp_path, capsys):
    path, _ = write_all(tmp_path)["sglang_stat"]
    out = tmp_path / "report.html"
    assert main(["report", str(path), "--ranks", "4", "--out", str(out)]) == 0
    page = out.read_text()
    assert "no source axis" in page
    assert "Remote picks per layer" not in page
    assert "GPU pair" not in page
    assert "Load of each rank over the mean, after" in page


def test_bad_targets_are_one_line_and_exit_code_2(traffic, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option, value in (("--out", "no/folder.html"), ("--json", "."), ("--ranks", "3")):
        assert main(["report", str(traffic), option, value]) == 2
        captured = capsys.readouterr().err
        assert captured.startswith(f"gimbal report: {option}")
        assert len(captured.strip().splitlines()) == 1
