"""`gimbal calibrate`: the paper's setting in one command, a user's file, and input that is not valid."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from gimbal_runtime.cli import main

ROUTING = Path(__file__).parents[3] / "shared" / "data" / "routing" / "routing.npz"


@pytest.fixture
def solver():
    pytest.importorskip("highspy", reason="highspy (extra offline) is not installed")


@pytest.mark.usefixtures("solver")
def test_the_papers_setting_in_one_command(tmp_path, capsys):
    listed, plots = tmp_path / "calibration.json", tmp_path / "calibration.html"
    assert main(["calibrate", "--layers", "8", "--json", str(listed), "--out", str(plots)]) == 0
    result = json.loads(listed.read_text())
    assert (result["experts"], result["ranks"], result["sources"]) == (128, 4, 2)
    assert result["reference"]["weights"] == {"alpha": 1.0, "beta": pytest.approx(0.08), "gamma": 1.0}
    assert result["matching"] == {"alpha": 1.0, "beta": pytest.approx(0.0025), "gamma": 1.0}
    assert max(result["reference"]["gap"]) <= 1e-4
    rows = {row["name"]: row for row in result["rows"]}
    # The paper: more than 80 % of the exact solver's decisions, remote picks within 0.6 %.
    assert rows["paper, calibrated"]["agreement"] > 0.8
    assert abs(rows["paper, calibrated"]["comm_difference"]) < 0.02
    assert rows["do nothing"]["agreement"] > 0.8
    assert rows["do nothing"]["agreement_moved"] == 0.0
    points = {(row["weights"]["beta"], row["weights"]["gamma"]) for row in result["grid"]}
    assert (0.0025, 1.0) in points
    assert len(points) == len(result["grid"])
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("do nothing") for line in printed)
    page = plots.read_text()
    assert "<script" not in page
    assert "http" not in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 7
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert page.count('class="mark"') == 4  # the paper's weights in every grid


@pytest.mark.usefixtures("solver")
def test_a_file_without_a_current_placement_and_weights_of_ones_own(tmp_path):
    path, listed = tmp_path / "traffic.npz", tmp_path / "x.json"
    np.savez(path, traffic=np.random.default_rng(0).poisson(50, (3, 2, 16)))
    grid = ["--betas", "0", "0.01", "--gammas", "0", "0.5"]
    weights = ["--ranks", "4", "--beta", "4", "--gamma", "0.02", "--layers", "2"]
    assert main(["calibrate", str(path), *grid, *weights, "--json", str(listed)]) == 0
    result = json.loads(listed.read_text())
    assert (result["layers"], len(result["grid"])) == (2, 4)
    assert result["reference"]["weights"] == {"alpha": 1.0, "beta": 4.0, "gamma": 0.02}
    assert result["matching"]["beta"] == pytest.approx(4.0 * 4 / 16)


@pytest.mark.usefixtures("solver")
@pytest.mark.skipif(not ROUTING.is_file(), reason="the recorded routing is not there")
def test_recorded_routing_of_the_small_model(tmp_path):
    """Four domains on two engines: the paper's heuristic, an exact placement and doing nothing on real routing."""
    with np.load(ROUTING) as data:
        ids, domain = data["topk_ids"], data["domain"]
    traffic = np.zeros((ids.shape[1], 2, 32), dtype=np.int64)
    for layer in range(ids.shape[1]):
        for source in range(2):
            traffic[layer, source] = np.bincount(ids[domain % 2 == source, layer].ravel(), minlength=32)
    path, listed = tmp_path / "traffic.npz", tmp_path / "x.json"
    np.savez(path, traffic=traffic)
    assert (
        main(
            ["calibrate", str(path), "--ranks", "4", "--beta", "4", "--gamma", "0.02", "--json", str(listed)]
        )
        == 0
    )
    rows = {row["name"]: row for row in json.loads(listed.read_text())["rows"]}
    assert rows["reference"]["comm"] < 0.9 * rows["do nothing"]["comm"]
    assert rows["portfolio"]["gap"] < 0.01
    assert rows["paper, calibrated"]["gap"] > rows["grid, best cost"]["gap"] >= rows["reference"]["gap"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.npz"], "none.npz: no such file"),
        (["--seed", "-1"], "--seed: -1"),
        (["--layers", "49"], "--layers: 49; valid: 1 to 48"),
        (["--ranks", "3"], "--ranks: 3 for 2 sources"),
        (["--ranks", "6"], "--spare: 0 gives 128 slots on 6 ranks"),
        (["--beta", "-1"], "--beta: -1.0"),
        (["--layers", "1", "--betas", "nan"], "beta: nan"),
        (["--layers", "1", "--gap", "0"], "gap: 0.0"),
        (["--layers", "1", "--time-limit", "-3"], "time_limit: -3.0"),
        (["--out", "no/folder.html"], "--out: no folder"),
    ],
)
@pytest.mark.usefixtures("solver")
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *arguments]) == 2
    captured = capsys.readouterr().err
    assert captured.startswith("gimbal calibrate: ")
    assert len(captured.strip().splitlines()) == 1
    assert message in captured


def test_spare_slots_are_refused(tmp_path, capsys):
    path = tmp_path / "spare.npz"
    np.savez(path, traffic=np.ones((1, 2, 8), dtype=int), current=np.array([[*range(8), 0, 1, 2, 3]]))
    assert main(["calibrate", str(path), "--ranks", "4"]) == 2
    assert "current: 12 slots for 8 experts; valid here: one slot per expert" in capsys.readouterr().err


def test_without_the_solver_it_says_what_to_install():
    code = (
        "import sys; sys.modules['highspy'] = None\n"
        "from gimbal_runtime.cli import main; sys.exit(main(['calibrate', '--layers', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "install highspy" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
