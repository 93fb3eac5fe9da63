"""`gimbal place`: figures that can be recomputed, dumps of other programs, and input that is not valid."""

from __future__ import annotations

import json
import struct
import zipfile

import numpy as np
import pytest
import torch
from gimbal_runtime.cli import main
from gimbal_runtime.tools import traffic_files
from gimbal_runtime.tools.errors import InputError
from gimbal_runtime.tools.placement_figures import figures_of
from gimbal_runtime.tools.traffic_files import read_traffic
from traffic_dumps import CURRENT, logical_loads, physical_loads, write_all

from gimbal_kernels.placement import PlacementProblem, Weights, evaluate, lower_bound, place
from gimbal_kernels.topology import Topology


@pytest.fixture
def traffic(tmp_path):
    rng = np.random.default_rng(1)
    picks = rng.poisson(200 * np.exp(rng.standard_normal((3, 2, 16))))
    path = tmp_path / "traffic.npz"
    np.savez(path, traffic=picks, current=np.tile(np.arange(16), (3, 1)))
    return path


def test_every_figure_is_that_of_the_library(traffic, tmp_path, capsys):
    out, listed = tmp_path / "placement.npz", tmp_path / "placement.json"
    arguments = ["--ranks", "4", "--gamma", "0.05", "--bound-nodes", "20", "--per-layer"]
    assert main(["place", str(traffic), *arguments, "--out", str(out), "--json", str(listed)]) == 0
    with np.load(traffic) as data:
        problem = PlacementProblem(
            data["traffic"],
            Topology.grid(gpus_per_node=4, sources=2),
            4,
            data["current"],
            Weights(1.0, 4.0, 0.05),
        )
    expected, bound = place(problem), lower_bound(problem, nodes=20)
    result = json.loads(listed.read_text())
    assert result["slots"] == expected.slots.tolist()
    assert result["after"]["per_layer"]["cost"] == expected.cost.tolist()
    assert result["after"]["per_layer"]["remote_share"] == pytest.approx(expected.comm.tolist())
    assert result["before"]["per_layer"]["comm"] == evaluate(problem, problem.current).comm.tolist()
    assert result["after"]["moves"] == int(expected.moves.sum())
    assert result["lower_bound"] == bound.tolist()
    gap = ((expected.cost - bound) / expected.cost).clip(min=0)
    assert result["gap"]["per_layer"] == pytest.approx(gap.tolist())
    with np.load(out) as saved:
        assert saved["slots"].tolist() == expected.slots.tolist()
        assert saved["lower_bound"].tolist() == bound.tolist()
    printed = capsys.readouterr().out
    assert f"{float(expected.comm.mean()):.1%}" in printed
    assert f"{float(gap.mean()):.3%}" in printed
    assert len([line for line in printed.splitlines() if " -> " in line]) == 3


def test_methods_limits_and_spare_slots(traffic, tmp_path):
    listed = tmp_path / "x.json"

    def run(*arguments: str) -> dict:
        assert main(["place", str(traffic), "--ranks", "4", *arguments, "--json", str(listed)]) == 0
        return json.loads(listed.read_text())

    assert run("--method", "stay")["after"]["moves"] == 0
    assert max(run("--max-moves", "2")["after"]["per_layer"]["moves"]) <= 2
    with np.load(traffic) as data:
        problem = PlacementProblem(
            data["traffic"], Topology.grid(gpus_per_node=4, sources=2), 4, data["current"]
        )
        np.savez(tmp_path / "free.npz", traffic=data["traffic"])
    assert run("--method", "paper", "--beta", "7")["slots"] == place(problem, method="paper").slots.tolist()
    by_bytes = run("--expert-bytes", "1e6", "--pick-bytes", "8192", "--horizon", "4")
    assert by_bytes["weights"]["gamma"] == Weights.for_expert(1e6, 8192, 4, problem.traffic).gamma
    free = ["place", str(tmp_path / "free.npz"), "--ranks", "4", "--method", "eplb", "--json", str(listed)]
    assert main([*free, "--spare", "8"]) == 0
    spare = json.loads(listed.read_text())
    assert np.shape(spare["slots"]) == (3, 24)
    assert spare["bound_covers"] == "all but balance"
    assert main([*free[:4], "--spare", "8", "--effort", "fast", "--json", str(listed)]) == 0
    copies = json.loads(listed.read_text())
    assert copies["after"]["comm"] < spare["after"]["comm"]
    assert all(len(set(row[6 * r : 6 * r + 6])) == 6 for row in copies["slots"] for r in range(4))
    assert main([*free, "--nodes", "2", "--groups", "4", "--far", "4"]) == 0
    nodes = [
        {e // 4 for e in row[8 * n : 8 * n + 8]}
        for row in json.loads(listed.read_text())["slots"]
        for n in (0, 1)
    ]
    assert all(len(groups) == 2 for groups in nodes)


def test_served_picks_add_up_and_go_to_the_nearest_copies():
    rng = np.random.default_rng(3)
    picks = rng.integers(0, 100, (2, 2, 6))
    problem = PlacementProblem(picks, Topology.grid(gpus_per_node=4, sources=2), 2)
    slots = np.array([[0, 1, 2, 3, 4, 5, 0, 2], [5, 4, 3, 2, 1, 0, 5, 1]])
    found = figures_of(problem, evaluate(problem, slots))
    assert found.served.sum(axis=2).tolist() == picks.sum(axis=2).tolist()
    # Source 0 owns ranks 0 and 1, source 1 owns 2 and 3: expert 0 has a copy near each.
    assert found.served[0, :, 0].tolist() == [picks[0, 0, 0], 0]
    assert found.served[0, :, 6].tolist() == [0, picks[0, 1, 0]]
    assert found.remote_share.tolist() == pytest.approx(found.placement.comm.tolist())
    ratio = found.rank_load.max(axis=1) / found.rank_load.mean(axis=1)
    assert ratio.tolist() == pytest.approx(found.placement.max_over_mean.tolist())


def test_dumps_of_sglang_and_vllm_are_read_and_said_to_have_no_sources(tmp_path, capsys):
    loads = logical_loads(physical_loads(4))
    for kind, (path, has_map) in write_all(tmp_path).items():
        file = read_traffic(path)
        assert file.traffic[:, 0].tolist() == loads.tolist(), kind
        assert file.loads_only
        assert (file.current is not None) == has_map
        if has_map:
            assert file.current.tolist() == CURRENT.tolist()
        method = ["--method", "eplb"] if has_map else []
        assert main(["place", str(path), "--ranks", "4", *method]) == 0
        printed = capsys.readouterr().out
        assert "no source axis" in printed
        assert "remote picks   " not in printed
        assert "rank load max/mean" in printed


def test_the_example_is_the_same_for_the_same_seed(tmp_path, capsys):
    first, second, other = (tmp_path / name for name in ("a.npz", "b.npz", "c.npz"))
    for path, seed in ((first, "3"), (second, "3"), (other, "4")):
        assert main(["place", "--example", str(path), "--seed", seed]) == 0
    assert f"gimbal place {first} --ranks 4" in capsys.readouterr().out
    a, b, c = (read_traffic(path).traffic for path in (first, second, other))
    assert a.shape == (48, 2, 128)
    assert (a == b).all()
    assert (a != c).any()


def npz(path, **arrays):
    np.savez(path, **arrays)


GOOD = np.ones((2, 2, 8), dtype=np.int64)
BAD_FILES = {
    "no key": (lambda p: npz(p, counts=GOOD), "no `traffic` in it, but counts"),
    "floats": (lambda p: npz(p, traffic=GOOD * 0.5), "traffic: dtype float64; valid: integers"),
    "bool": (lambda p: npz(p, traffic=GOOD > 0), "traffic: dtype bool; valid: integers"),
    "negative": (lambda p: npz(p, traffic=GOOD - 2), "traffic: -1 picks, first negative at [0, 0, 0]"),
    "two axes": (lambda p: npz(p, traffic=GOOD[0]), "traffic: shape [2, 8]; valid: [L, S, E]"),
    "no layers": (lambda p: npz(p, traffic=GOOD[:0]), "traffic: shape [0, 2, 8]"),
    "no picks": (lambda p: npz(p, traffic=GOOD * 0), "no picks at all"),
    "huge counts": (lambda p: npz(p, traffic=np.full((1, 2, 8), 2**64 - 1, np.uint64)), "valid: below 2^63"),
    "huge sum": (lambda p: npz(p, traffic=GOOD * 2**62), "more than 2^63 picks in all"),
    "many experts": (lambda p: npz(p, traffic=np.ones((1, 1, 20000), int)), "20000 experts; valid: at most"),
    "slots": (
        lambda p: npz(p, traffic=GOOD, current=np.zeros((2, 8), int)),
        "current: layer 0 has no slot for",
    ),
    "slot layers": (lambda p: npz(p, traffic=GOOD, current=np.arange(8)[None]), "current: shape (1, 8)"),
    "slot floats": (
        lambda p: npz(p, traffic=GOOD, current=np.zeros((2, 8))),
        "current: shape [2, 8], dtype float64",
    ),
    "distance": (lambda p: npz(p, traffic=GOOD, distance=-np.ones((2, 2))), "distance: has negative"),
    "objects": (lambda p: np.savez(p, traffic=np.array([{}, []], dtype=object)), "not readable as .npz"),
    "empty": (lambda p: p.write_bytes(b""), "empty file"),
    "text": (lambda p: p.write_text("traffic"), "not readable as .npz"),
    "cut short": (lambda p: p.write_bytes(_whole(p)[:200]), "not readable as .npz"),
}


def _whole(path):
    npz(path, traffic=GOOD)
    return path.read_bytes()


def refused(arguments, capsys) -> str:
    assert main(["place", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("gimbal place: ")
    assert len(captured.err.strip().splitlines()) == 1
    assert "valid" in captured.err
    return captured.err


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_one_line_and_exit_code_2(kind, tmp_path, capsys):
    write, message = BAD_FILES[kind]
    path = tmp_path / "bad.npz"
    write(path)
    assert message in refused([path, "--ranks", "2"], capsys)


def test_an_array_that_would_fill_the_memory_is_refused(tmp_path, capsys, monkeypatch):
    # A header that promises 51 GB and a body that does not hold them.
    path = tmp_path / "liar.npz"
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000, 64, 100000), }"
    header += b" " * (117 - len(header)) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "traffic.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
        )
    assert "not readable as .npz" in refused([path, "--ranks", "4"], capsys)
    monkeypatch.setattr(traffic_files, "MOST_BYTES", 2**20)
    np.savez_compressed(path, traffic=np.ones((2, 64, 2048), dtype=np.int64))
    assert path.stat().st_size < 2**15
    assert "an array of 0.0 GiB; valid: at most 0.000976562 GiB" in refused([path, "--ranks", "64"], capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list"),
        ({"records": []}, "records: empty"),
        ({"records": [{"rank": 0}]}, "records: one without `global_physical_count`"),
        ({"expert_load_window": torch.ones(2, 1, 4, dtype=torch.int32)}, "no `physical_to_logical_map`"),
        ({"logical_count": torch.ones(2, 1, 4)}, "logical_count: dtype float32"),
        ({"logical_count": torch.ones(4, dtype=torch.int32)}, "logical_count: shape [4]"),
    ],
)
def test_a_bad_dump_is_one_line_and_exit_code_2(content, message, tmp_path, capsys):
    path = tmp_path / "dump.pt"
    torch.save(content, path)
    assert message in refused([path, "--ranks", "2"], capsys)


@pytest.mark.parametrize("new_format", [True, False])
def test_damaged_dumps_are_refused_whatever_is_broken(new_format, tmp_path):
    path = tmp_path / "dump.pt"
    content = {"logical_count": torch.ones(2, 3, 4, dtype=torch.int32)}
    torch.save(content, path, _use_new_zipfile_serialization=new_format)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    messages = []
    for _ in range(150):
        damaged = bytearray(whole)
        at = int(rng.integers(len(whole)))
        damaged[at : at + int(rng.integers(1, 9))] = rng.bytes(int(rng.integers(0, 4)))
        path.write_bytes(bytes(damaged))
        try:
            read_traffic(path)
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert not any("\n" in message for message in messages)


def test_a_dump_that_would_run_code_is_refused(tmp_path, capsys):
    path = tmp_path / "dump.pt"
    torch.save({"logical_count": _Evil()}, path)
    assert "not readable by torch.load" in refused([path, "--ranks", "2"], capsys)


class _Evil:
    def __reduce__(self):
        return (pytest.fail, ("code from a file was run",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "TRAFFIC: not given"),
        (["none.npz"], "none.npz: no such file"),
        (["@", "--ranks", "0"], "--ranks: 0; valid: 1 to 1024"),
        (["@", "--ranks", "3"], "--ranks: 3 for 2 sources; nearest valid: 4"),
        (["@", "--ranks", "4", "--nodes", "3"], "--nodes: 3; valid: a divisor of 4 ranks"),
        (["@", "--ranks", "4", "--spare", "4"], "--spare: 4; valid: 0, the current placement has 16 slots"),
        (["@", "--ranks", "10"], "--spare: 0 gives 16 slots on 10 ranks; nearest valid: 4 spare slots"),
        (["@", "--ranks", "4", "--beta", "-1"], "beta: -1.0; valid"),
        (["@", "--ranks", "4", "--gamma", "nan"], "gamma: nan; valid"),
        (["@", "--ranks", "4", "--far", "-1", "--nodes", "2"], "distance: has negative"),
        (["@", "--ranks", "4", "--max-moves", "-1"], "max_moves: -1; valid"),
        (["@", "--ranks", "4", "--max-moves", "1", "--method", "eplb"], "max_moves: 1 with method 'eplb'"),
        (["@", "--ranks", "4", "--expert-bytes", "5"], "--expert-bytes and --pick-bytes: one of them"),
        (["@", "--ranks", "4", "--groups", "4"], "--groups: with method portfolio"),
        (["@", "--ranks", "4", "--bound-nodes", "-1"], "nodes: -1; valid"),
        (["@", "--ranks", "4", "--out", "no/folder/x.npz"], "--out: no folder"),
        (["@", "--ranks", "4", "--json", "."], "--json: . is a folder"),
        (["@", "--example", "x.npz"], "--example: with"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(arguments, message, traffic, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert message in refused([traffic if a == "@" else a for a in arguments], capsys)


def test_one_source_needs_the_number_of_ranks(tmp_path, capsys):
    path = tmp_path / "one.npz"
    npz(path, traffic=GOOD[:, :1])
    assert "--ranks: not given" in refused([path], capsys)


def test_a_target_that_cannot_be_written(traffic, tmp_path, capsys):
    target = tmp_path / ("x" * 300)  # longer than a file's name may be, for root too
    for option in ("--out", "--json"):
        message = refused([traffic, "--ranks", "4", "--bound-nodes", "0", option, target], capsys)
        assert message.startswith(f"gimbal place: {option}: ")
    assert refused(["--example", target], capsys).startswith("gimbal place: --example: ")
    assert "no such file" in refused([target], capsys)
