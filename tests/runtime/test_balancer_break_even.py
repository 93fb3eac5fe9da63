"""The break-even rule of SPEC section 5: its two sides by hand, its edges, its errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gimbal_runtime.break_even import ServingCosts, break_even, layer_seconds
from hypothesis import given
from hypothesis import strategies as st

from gimbal_kernels.placement import PlacementProblem, evaluate
from gimbal_kernels.topology import Topology

COSTS = ServingCosts(bytes_per_pick=1000.0, bandwidth=1e6, seconds_per_pick=1e-3)


def test_seconds_of_a_layer_by_hand() -> None:
    """Two ranks; source 0 lives on rank 0 and picks expert 1 on rank 1 thirty times, expert 0 ten times."""
    traffic = np.array([[[10, 30], [0, 0]]])
    placement = evaluate(PlacementProblem(traffic, Topology.grid(gpus_per_node=2, sources=2), 1), [[0, 1]])
    seconds = layer_seconds(placement.comm, placement.max_over_mean, [40], ranks=2, costs=COSTS)
    # 30 remote picks of 1000 bytes over two links of 1e6 bytes/s, and 30 picks of a millisecond on rank 1.
    assert seconds.tolist() == pytest.approx([30 * 1000 / 2 / 1e6 + 30 * 1e-3])


def test_layers_count_by_their_own_traffic() -> None:
    seconds = layer_seconds([0.5, 0.5, 0.0], [1.0, 1.0, 1.0], [100, 1000, 0], ranks=2, costs=COSTS)
    assert seconds[1] == pytest.approx(10 * seconds[0])
    assert seconds[2] == 0.0


def rule(saved: Any = (0.1, 0.2), busiest: float = 1e6, **changes: Any) -> Any:
    return break_even(saved, busiest, **({"bandwidth": 1e6, "horizon": 4.0} | changes))


def test_both_sides_by_hand() -> None:
    found = rule(overlap=0.25, margin=0.5)
    assert found.saved == pytest.approx(4 * 0.3)
    assert found.price == pytest.approx(0.75 * 1.0 * 1.5)
    assert found.pays
    assert not rule(margin=0.5).pays  # 1.2 saved, 1.5 paid
    assert not rule(saved=[-5.0, 0.2], busiest=0.0).pays


def test_equal_sides_do_not_move() -> None:
    assert not break_even([0.25], 1e6, bandwidth=1e6, horizon=4.0).pays
    assert not break_even([0.0], 0.0, bandwidth=1e6, horizon=4.0).pays


@given(
    st.lists(st.floats(-10, 10), min_size=1, max_size=5),
    st.floats(0, 1e9),
    st.floats(1, 1e9),
    st.floats(0.5, 100),
    st.floats(0, 0.99),
    st.floats(0, 0.99),
)
def test_the_rule_is_the_specs(
    saved: list[float], busiest: float, bandwidth: float, horizon: float, overlap: float, margin: float
) -> None:
    found = break_even(saved, busiest, bandwidth=bandwidth, horizon=horizon, overlap=overlap, margin=margin)
    price = (1 - overlap) * (busiest / bandwidth) * (1 + margin)
    if abs(horizon * math.fsum(saved) - price) > 1e-9 * max(1.0, price):
        assert found.pays == (horizon * math.fsum(saved) > price)
    # Hiding more, asking for less and living longer never turn a gain into a loss.
    if found.pays:
        assert break_even(
            saved, busiest, bandwidth=bandwidth, horizon=2 * horizon, overlap=min(0.999, overlap + 0.005)
        ).pays


def test_what_is_unknown_is_named_and_never_guessed() -> None:
    assert ServingCosts(bytes_per_pick=1.0).unknown == ("bandwidth", "seconds_per_pick")
    assert ServingCosts(bytes_per_pick=1.0, bandwidth=1.0).unknown == ("seconds_per_pick",)
    assert COSTS.unknown == ()
    with pytest.raises(ValueError, match="costs: seconds_per_pick unknown"):
        layer_seconds([0.5], [1.0], [10], ranks=2, costs=ServingCosts(bytes_per_pick=1.0, bandwidth=1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap": 1.0}, r"overlap: 1\.0; valid: a number in \[0, 1\)"),
        ({"margin": -0.1}, "margin: -0.1"),
        ({"margin": math.nan}, "margin: nan"),
        ({"horizon": 0.0}, "horizon: 0.0; valid: a finite number > 0"),
        ({"bandwidth": math.inf}, "bandwidth: inf"),
        ({"busiest": -1.0}, "busiest_bytes: -1.0"),
        ({"saved": [math.nan]}, "saved_seconds"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(**changes)


@pytest.mark.parametrize("name", ["bytes_per_pick", "bandwidth", "seconds_per_pick"])
def test_costs_are_positive(name: str) -> None:
    for value in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"{name}: "):
            ServingCosts(**({"bytes_per_pick": 1.0} | {name: value}))
    with pytest.raises(ValueError, match="ranks: 0"):
        layer_seconds([0.5], [1.0], [10], ranks=0, costs=COSTS)
