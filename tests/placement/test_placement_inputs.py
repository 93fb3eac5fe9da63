"""What a problem accepts, and what it refuses and how it says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gimbal_kernels.placement import PlacementProblem, Weights, place
from gimbal_kernels.topology import Topology

LINE = Topology([[0, 1]])


class OnlyDlpack:
    """An array of some other library: nothing but the exchange protocol."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


PICKS = [[[5, 1, 3, 1]]]


@pytest.mark.parametrize(
    "traffic",
    [
        PICKS,
        np.array(PICKS),
        np.array(PICKS, dtype=np.uint16),
        np.array(PICKS, dtype=np.float32),
        np.asfortranarray(PICKS),
        torch.tensor(PICKS),
        torch.tensor(PICKS, dtype=torch.bfloat16),
        torch.tensor(PICKS, dtype=torch.float64, requires_grad=True),
        OnlyDlpack(torch.tensor(PICKS)),
    ],
)
def test_any_array_gives_the_same_problem(traffic):
    problem = PlacementProblem(traffic, LINE, 2)
    assert problem.traffic.tolist() == PICKS
    assert place(problem).slots.tolist() == place(PlacementProblem(PICKS, LINE, 2)).slots.tolist()


def test_the_problem_keeps_its_own_copy():
    traffic, current = np.array(PICKS, dtype=np.float64), np.arange(4, dtype=np.int32)[None]
    problem = PlacementProblem(traffic, LINE, 2, current)
    traffic[:], current[:] = 9, 0
    assert problem.traffic.tolist() == PICKS
    assert problem.current.tolist() == [[0, 1, 2, 3]]
    assert not problem.traffic.flags.writeable
    assert not problem.current.flags.writeable


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 0, 4), (1, 1, 0), (1, 1, 1, 4)])
def test_traffic_of_a_wrong_shape(shape):
    with pytest.raises(ValueError, match=r"traffic: shape .*valid: \[L, S, E\]"):
        PlacementProblem(np.zeros(shape), LINE, 2)


@pytest.mark.parametrize("dtype", [bool, complex, object, "U1"])
def test_traffic_of_a_wrong_dtype(dtype):
    with pytest.raises(ValueError, match="traffic: dtype"):
        PlacementProblem(np.zeros((1, 1, 4), dtype=dtype), LINE, 2)


def test_sources_that_the_topology_does_not_have():
    with pytest.raises(ValueError, match=r"traffic: 2 sources, topology has 1; valid: \[L, 1, E\]"):
        PlacementProblem(np.zeros((1, 2, 4)), LINE, 2)


def test_a_bare_distance_matrix_is_no_topology():
    with pytest.raises(ValueError, match="topology: list; valid: a Topology"):
        PlacementProblem(PICKS, [[0, 1]], 2)


@pytest.mark.parametrize(
    ("slots_per_rank", "message"),
    [
        (
            1,
            r"slots_per_rank: 1 gives 2 slots for 4 experts on 2 ranks; valid: at least 2 \(4 slots, 0 spare\)",
        ),
        (0, "slots_per_rank: 0 gives 0 slots"),
        (-3, "slots_per_rank: -3 gives"),
        (5, "slots_per_rank: 5 for 4 experts.*valid: at most 4"),
        (2.0, "slots_per_rank: 2.0; valid: an integer, at least 2"),
        (True, "slots_per_rank: True; valid: an integer"),
    ],
)
def test_impossible_numbers_of_slots_name_the_nearest_valid_one(slots_per_rank, message):
    with pytest.raises(ValueError, match=message):
        PlacementProblem(PICKS, LINE, slots_per_rank)


@pytest.mark.parametrize(
    ("current", "message"),
    [
        ([0, 1, 2, 3], r"current: shape \(4,\); valid: \[1, 4\] \(2 ranks of 2 slots\)"),
        ([[0, 1, 2, 3, 0]], r"current: shape \(1, 5\)"),
        ([[0, 1, 2, 2]], "current: layer 0 has no slot for expert 3"),
        ([[0, 1, 2, 7]], "current: layer 0, slot 3 holds 7; valid: 0 to 3"),
        ([[0.0, 1.0, 2.0, 3.0]], "current: dtype float64; valid: integers"),
    ],
)
def test_a_bad_current_placement(current, message):
    with pytest.raises(ValueError, match=message):
        PlacementProblem(PICKS, LINE, 2, current)


def test_history_and_weights_of_a_wrong_kind():
    with pytest.raises(ValueError, match="history: 8 windows; valid: at most 7"):
        PlacementProblem(PICKS, LINE, 2, history=(PICKS,) * 8)
    with pytest.raises(
        ValueError, match=r"history\[1\]: 1 layers of 3 experts; valid: 1 layers of 4 experts"
    ):
        PlacementProblem(PICKS, LINE, 2, history=(PICKS, [[1, 2, 3]]))
    with pytest.raises(ValueError, match=r"history\[0\]: nan at"):
        PlacementProblem(PICKS, LINE, 2, history=([[1, 2, 3, float("nan")]],))
    with pytest.raises(ValueError, match="drift: -1"):
        PlacementProblem(PICKS, LINE, 2, drift=-1)
    with pytest.raises(ValueError, match=r"drift: '0\.3'"):
        PlacementProblem(PICKS, LINE, 2, drift="0.3")
    with pytest.raises(ValueError, match="weights: tuple; valid"):
        PlacementProblem(PICKS, LINE, 2, weights=(1, 4, 0))


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 1e300, "a", "4", None])
@pytest.mark.parametrize("name", ["alpha", "beta", "gamma"])
def test_bad_weights(name, value):
    with pytest.raises(ValueError, match=name):
        Weights(**{name: value})


def test_unknown_method_and_backend_list_the_valid_ones():
    problem = PlacementProblem(PICKS, LINE, 2)
    with pytest.raises(ValueError, match="method: 'magic'; valid: portfolio, paper, greedy, eplb, stay"):
        place(problem, method="magic")
    with pytest.raises(ValueError, match="backend: 'gpu'; valid: auto, host, reference"):
        place(problem, backend="gpu")


@pytest.mark.parametrize("method", ["paper", "greedy"])
def test_spare_slots_need_a_method_that_makes_copies(method):
    with pytest.raises(
        ValueError, match="6 slots for 4 experts; valid with spare slots: portfolio, eplb, stay"
    ):
        place(PlacementProblem(PICKS, LINE, 3), method=method)


def test_weights_for_an_expert_make_a_move_earn_back_its_bytes():
    # 9.44 MB per expert, 8 KiB per pick: a move costs 1152.3 picks. Two layers of mean load 50 over 20 windows.
    traffic = np.full((2, 2, 4), 25)
    weights = Weights.for_expert(9.44e6, 8192, 20, traffic, beta=20.0)
    assert weights.gamma == pytest.approx(9.44e6 / 8192 / (50 * 20))
    assert (weights.alpha, weights.beta) == (1.0, 20.0)
    assert Weights.for_expert(9.44e6, 8192, 20, np.zeros((0, 2, 4))).gamma == 0.0


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_weights_for_an_impossible_expert(position, bad):
    arguments = [9.44e6, 8192, 20]
    arguments[position] = bad
    name = ("bytes_per_expert", "bytes_per_pick", "horizon")[position]
    with pytest.raises(ValueError, match=name):
        Weights.for_expert(*arguments, PICKS)
