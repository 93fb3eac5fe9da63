"""`gimbal bench`: a small table with its JSON, and bad input."""

from __future__ import annotations

import json

import pytest
import torch
from gimbal_runtime.cli import main


@pytest.fixture(autouse=True)
def same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_small_table_and_its_json(tmp_path, capsys):
    file = tmp_path / "counting.json"
    arguments = ["bench", "counting", "--device", "cpu", "--tokens", "1", "64", "--seconds", "0.01"]
    assert main([*arguments, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [row["tokens"] for row in result["rows"]] == [1, 64, 64, 64]
    assert {"torch", "bincount", "gather only", "copy only"} <= set(result["rows"][0]["microseconds"])
    assert all(value > 0 for row in result["rows"] for value in row["microseconds"].values())
    assert result["versions"]["torch"] == torch.__version__
    assert {"command", "commit", "machine", "torch_threads", "unit"} <= set(result)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5
    assert printed[0].split()[:4] == ["T", "E", "K", "S"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "3"], "--tokens [3]; valid: some of 1, 4, 16"),
        (["--seconds", "0"], "--seconds 0.0; valid: above 0, at most 60"),
        (["--threads", "0"], "--threads 0; valid: 1 or more"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(["bench", "counting", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_device_that_is_not_there(capsys):
    assert main(["bench", "counting", "--device", "cuda"]) == 2
    assert "--device cuda: no CUDA device here; valid: cpu" in capsys.readouterr().err
