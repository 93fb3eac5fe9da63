"""Confirmed skew over several windows: `rate` and `memory` of `shrink`, where few topics make up the traffic."""

from __future__ import annotations

import numpy as np
import pytest

from gimbal_kernels.placement import shrink


def topic_windows(affine: bool, count: int):
    """[2, 2, 48] picks of 200 requests of 8 topics; a request goes to a source at random, or mostly by topic."""
    rng = np.random.default_rng(3)
    share = np.exp(rng.standard_normal((2, 8, 48)))
    share /= share.sum(axis=2, keepdims=True)
    for _ in range(count):
        topic = rng.integers(0, 8, 200)
        source = rng.integers(0, 2, 200)
        if affine:
            source = np.where(rng.random(200) < 0.9, topic % 2, source)
        requests = np.zeros((2, 8))
        np.add.at(requests, (source, topic), 1000)
        yield rng.poisson(np.einsum("st,lte->lse", requests, share))


def rhos(affine: bool, **options: float) -> np.ndarray:
    state, found = None, []
    for picks in topic_windows(affine, 60):
        _, state = shrink(picks, state, **options)
        found.append(state.rho)
    return np.array(found[20:])


def test_chance_agreement_of_few_topics_is_averaged_out():
    assert rhos(False).max() > 0.4  # a window at a time, noise looks confirmed now and then
    assert rhos(False, memory=0.98).max() <= 0.2
    assert rhos(True, memory=0.98).min() >= 0.8


def test_memory_sums_both_parts_of_rho():
    first, second, third = (picks for picks in topic_windows(False, 3))
    state = shrink(first)[1]
    skews = [state.skew]
    for picks in (second, third):
        _, state = shrink(picks, state, rate=0.5, memory=0.7)
        skews.append(state.skew)
    # The running means are halves: the newest skew is twice the mean less the mean before.
    new = [2 * skews[1] - skews[0], 2 * skews[2] - skews[1]]
    agreement = 0.7 * (new[0] * skews[0]).sum() + (new[1] * skews[1]).sum()
    energy = 0.7 * (skews[0] ** 2).sum() + (skews[1] ** 2).sum()
    assert state.rho == pytest.approx(np.clip(agreement / energy, 0, 1))


@pytest.mark.parametrize("name", ["rate", "memory"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), "a"])
def test_bad_rates(name, value):
    with pytest.raises(ValueError, match=f"{name}: "):
        shrink(np.ones((1, 2, 4)), **{name: value})
