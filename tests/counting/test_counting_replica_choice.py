"""The choice among equally near copies is even: for every copy count and stride, and over sources."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gimbal_kernels.counting import ReplicaMap, map_and_count
from gimbal_kernels.counting.reference import choose_replica
from gimbal_kernels.topology import Topology

TOKENS = 2048
STRIDES = (1, 2, 3, 4, 8, 16, 64)
COPIES = range(2, 17)


def chosen(rows, copies, source=0, expert=0):
    source, expert = torch.as_tensor(source), torch.as_tensor(expert)
    return choose_replica(torch.as_tensor(rows), source, expert, torch.tensor(copies))


def fullest_share(rows, copies, **where):
    counts = torch.bincount(chosen(rows, copies, **where), minlength=copies)
    return float(counts.max()) * copies / len(rows)


@pytest.mark.parametrize("copies", COPIES)
def test_report_16_even_for_every_stride_and_start(copies):
    for stride in STRIDES:
        for start in (0, 1, 5, 777, 4096, 100_003):
            rows = start + stride * torch.arange(TOKENS)
            share = fullest_share(rows, copies)
            assert share <= 1.05, f"stride {stride} from row {start}: {share:.3f} of the fair share"


def test_report_16_at_the_public_function():
    # Two copies equally far from the source; only the even rows hold a token.
    table = ReplicaMap.from_slots([[0, 1, 0, 2]], Topology([[1.0, 1.0]]), num_experts=3)
    ids = torch.full((2 * TOKENS, 1), -1, dtype=torch.int32)
    ids[::2] = 0
    load = torch.zeros(1, 4, dtype=torch.int64)
    map_and_count(ids, table, torch.zeros(1, 1, 3, dtype=torch.int64), layer=0, source=0, physical_load=load)
    assert load[0].sum() == TOKENS
    assert max(load[0, 0], load[0, 2]) <= 1.05 * TOKENS / 2


def test_the_choice_of_token_mod_copies_would_be_caught():
    rows = 2 * torch.arange(TOKENS)
    knuth = ((rows * 2654435769) & 0xFFFFFFFF) % 2
    assert torch.bincount(knuth, minlength=2).tolist() == [2048, 0]
    assert fullest_share(rows, 2) <= 1.05


@pytest.mark.parametrize("copies", COPIES)
def test_report_17_one_token_of_each_source_in_any_row(copies):
    for sources in (2, 3, 8, 64):
        for row in (0, 1, 2, 17, 4095):
            for expert in (0, 1, 130):
                counts = torch.bincount(
                    chosen(torch.tensor(row), copies, torch.arange(sources), expert), minlength=copies
                )
                assert counts.max() - counts.min() <= 1
    assert torch.bincount(chosen(torch.tensor(0), 2, torch.arange(8))).tolist() == [4, 4]


def test_a_lone_token_does_not_lean_to_the_first_copy():
    counts = torch.bincount(chosen(torch.tensor(0), 2, 0, torch.arange(128)), minlength=2)
    assert counts.tolist() == [64, 64]


def test_no_stride_is_much_worse_than_a_random_choice():
    # In standard deviations of a fair random choice. The golden ratio alone reaches 27 (stride 610); true random
    # numbers reach 5, as the largest of so many samples.
    worst = 0.0
    for stride in range(1, 1024):
        for tokens in (48, TOKENS):
            if stride * tokens > 65_536 and tokens > 48:
                continue
            rows = stride * torch.arange(tokens)
            for copies in (2, 3, 4, 8, 16):
                counts = torch.bincount(chosen(rows, copies), minlength=copies)
                fair = tokens / copies
                sigma = (fair * (1 - 1 / copies)) ** 0.5
                worst = max(worst, (float(counts.max()) - fair) / sigma)
    assert worst < 9


def test_random_subsets_of_rows_spread_at_least_like_a_random_choice():
    # An expert sees a subset of the rows. Chi-square per degree of freedom is 1 for a random choice.
    rng = np.random.default_rng(0)
    for copies in (2, 3, 4, 7, 16):
        chi = []
        for _ in range(60):
            rows = torch.from_numpy(np.sort(rng.choice(16_384, 512, replace=False)))
            counts = torch.bincount(chosen(rows, copies), minlength=copies).double()
            chi.append(float(((counts - 512 / copies) ** 2).sum() / (512 / copies)) / (copies - 1))
        assert np.mean(chi) < 1.4, copies


def test_index_is_in_range_for_large_rows_and_many_copies():
    rows = torch.tensor([0, 1, 2**20 - 1, 2**24, 2**31 - 1])
    for copies in (1, 2, 17, 64, 1000):
        index = chosen(rows, copies, 63, 1024)
        assert (index >= 0).all()
        assert (index < copies).all()
