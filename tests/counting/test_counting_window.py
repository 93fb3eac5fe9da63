"""TrafficWindow: generations, addresses, width of the totals, and the sum over a process group."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gimbal_kernels.counting import ReplicaMap, TrafficWindow, map_and_count
from gimbal_kernels.topology import Topology

HERE = Path(__file__).parent


def test_close_hands_out_the_window_and_starts_the_next():
    window = TrafficWindow(1, 1, 4)
    table = ReplicaMap.from_slots([[0, 1, 2, 3]], Topology([[0.0]]), num_experts=4)
    address = window.counts.data_ptr()
    map_and_count(torch.tensor([[0, 1], [0, 3]]), table, window.counts, layer=0, source=0)
    first = window.close()
    map_and_count(torch.tensor([[2, 1]]), table, window.counts, layer=0, source=0)
    second = window.close()
    assert first.tolist() == [[[2, 1, 0, 1]]]
    assert second.tolist() == [[[0, 1, 1, 0]]]
    assert first.dtype == torch.int64
    assert window.close().sum() == 0
    assert window.counts.data_ptr() == address


def test_what_is_made_in_inference_mode_is_recorded_into_and_updated_outside():
    with torch.inference_mode():
        window = TrafficWindow(1, 1, 2)
        table = ReplicaMap.from_slots([[0, 1]], Topology([[0.0, 1.0]]), num_experts=2)
    for slots in ([[0, 1]], [[1, 0]]):
        table.update(slots)
        mapped = map_and_count(torch.tensor([[0]]), table, window.counts, layer=0, source=0, backend="torch")
        assert mapped.tolist() == [[slots[0].index(0)]]
    with torch.inference_mode():
        map_and_count(torch.tensor([[1]]), table, window.counts, layer=0, source=0, backend="torch")
        assert window.close().tolist() == [[[2, 1]]]
    assert window.close().sum() == 0


def test_report_15_totals_do_not_wrap():
    wide = TrafficWindow(1, 1, 1)
    wide.counts.fill_(2**31 - 1)
    wide.counts.add_(1)
    assert wide.close().item() == 2**31
    narrow = TrafficWindow(1, 1, 1, dtype=torch.int32)
    assert narrow.counts.dtype == torch.int32
    for picks in (2**31 - 1, 1):
        narrow.counts.add_(picks)
        narrow.fold()
        assert narrow.counts.item() == 0
    narrow.counts.add_(5)
    assert narrow.close().item() == 2**31 + 5
    assert narrow.close().item() == 0


def test_a_failed_reduction_keeps_the_picks_for_the_next_window(monkeypatch):
    window = TrafficWindow(1, 1, 2, group="any")

    def fail(*args, **kwargs):
        raise RuntimeError("peer lost")

    window.counts.add_(3)
    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(RuntimeError, match="peer lost"):
        window.close()
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
    window.counts.add_(1)
    assert window.close().tolist() == [[[4, 4]]]


class SlowSum:
    """Stands in for a reduction that is still running; `released` ends it, with `error` if there is one."""

    def __init__(self, error=None):
        self.released, self.error = threading.Event(), error

    def is_completed(self):
        return self.released.is_set()

    def wait(self):
        assert self.released.wait(30)
        if self.error is not None:
            raise self.error


def test_closing_blocks_neither_the_host_nor_recording(monkeypatch):
    sums = [SlowSum(), SlowSum()]
    pending = iter(sums)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: next(pending))
    window = TrafficWindow(1, 1, 2, group="any")
    address = window.counts.data_ptr()
    window.counts.add_(3)
    first = window.close_async()
    window.counts.add_(4)
    second = window.close_async()  # while the first is still on its way
    window.counts.add_(5)
    assert (first.done(), second.done()) == (False, False)
    seen = []
    balancer = threading.Thread(target=lambda: seen.append(first.wait().tolist()))
    balancer.start()
    sums[1].released.set()
    assert second.wait().tolist() == [[[4, 4]]]
    sums[0].released.set()
    balancer.join(30)
    assert seen == [[[[3, 3]]]]
    assert first.done()
    assert first.wait().tolist() == [[[3, 3]]]
    assert window.counts.tolist() == [[[5, 5]]]
    assert window.counts.data_ptr() == address


def test_a_sum_that_fails_later_puts_its_picks_into_the_next_window(monkeypatch):
    failing = SlowSum(RuntimeError("peer lost"))
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: failing)
    window = TrafficWindow(1, 1, 2, group="any")
    window.counts.add_(3)
    closing = window.close_async()
    failing.released.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="peer lost"):
            closing.wait()
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
    window.counts.add_(1)
    assert window.close().tolist() == [[[4, 4]]]


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ((0, 1, 1), {}, "num_layers: 0; valid: an integer >= 1"),
        ((1, -1, 1), {}, "num_sources: -1"),
        ((1, 1, 2.0), {}, "num_experts: 2.0"),
        ((1, 1, 1), {"dtype": torch.float32}, "dtype: torch.float32; valid: torch.int64 or torch.int32"),
    ],
)
def test_bad_sizes_are_refused(sizes, changes, message):
    with pytest.raises(ValueError, match=message):
        TrafficWindow(*sizes, **changes)


def test_report_5_the_sum_over_two_processes_conserves_every_pick(tmp_path):
    command = [sys.executable, str(HERE / "window_worker.py")]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], errors
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1]
    first, second = seen[0]
    total = torch.tensor(first["total"])
    # tokens · top-k of each source in every layer: 5·4 and 6·4.
    assert total.sum(2).tolist() == [[20, 24], [20, 24]]
    assert first["all_reduces"] == second["all_reduces"] == 1
    assert first["twin"] == 2 * 20
    assert torch.tensor(second["total"]).sum() == 0
