"""The iteration model (SPEC section 8): its time, its fit, and when a fit is good."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from gimbal_runtime.iteration_model import (
    FitQuality,
    Iteration,
    IterationFitter,
    IterationModel,
    _nonnegative_least_squares,
)
from hypothesis import given, settings
from hypothesis import strategies as st

TRUE = IterationModel(0.009, 6e-5, 2.5e-8, 8e-5, 4e-10)


def iterations(model: IterationModel, count: int, noise: float = 0.0, seed: int = 0) -> list[Iteration]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        prefills = draw.choice([0, 0, 1, 2])
        chunks = [(draw.randrange(1, 2_048), draw.randrange(8_192)) for _ in range(prefills)]
        n_decode, kv = draw.randrange(64), draw.randrange(90_000)
        seconds = model.time(n_decode, kv, chunks) * (1 + draw.uniform(-noise, noise))
        made.append(Iteration(n_decode, kv, chunks, seconds))
    return made


def coefficients(model: IterationModel) -> tuple[float, ...]:
    return model.a, model.c0, model.c1, model.c_pf, model.c_attn


def test_time_adds_up_by_hand() -> None:
    model = IterationModel(1.0, 0.1, 0.01, 0.001, 0.0001)
    # 1 + 3·0.1 + 20·0.01 + (8 + 4)·0.001 + (8·(2 + 4) + 4·(0 + 2))·0.0001
    assert model.time(3, 20, [(8, 2), (4, 0)]) == pytest.approx(1.5 + 0.012 + 0.0056)
    assert model.time(0, 0) == 1.0


def test_cutting_a_prompt_costs_the_base_only() -> None:
    whole = TRUE.time(0, 0, [(4_096, 100)])
    cut = sum(TRUE.time(0, 0, [(512, 100 + done)]) for done in range(0, 4_096, 512))
    assert cut - whole == pytest.approx(7 * TRUE.a)


def test_fit_recovers_exact_coefficients() -> None:
    fitted = IterationModel.fit(iterations(TRUE, 200))
    assert coefficients(fitted) == pytest.approx(coefficients(TRUE), rel=1e-6)
    assert fitted.quality is not None
    assert fitted.quality.error < 1e-6
    assert fitted.good


def test_fit_under_noise_reports_its_error() -> None:
    fitted = IterationModel.fit([tuple(sample) for sample in iterations(TRUE, 500, noise=0.1)])
    assert fitted.quality is not None
    # Uniform noise of ±10 % has a root mean square of 5.8 %.
    assert 0.05 < fitted.quality.error < 0.065
    assert fitted.c_pf == pytest.approx(TRUE.c_pf, rel=0.1)
    assert fitted.good


def test_no_coefficient_is_negative() -> None:
    """Time that falls with the number of decodes would fit best with a negative coefficient."""
    samples = [Iteration(n, 0, [(100, 0)], 0.02 - 1e-4 * n) for n in range(50)]
    fitted = IterationModel.fit(samples)
    assert all(value >= 0.0 for value in coefficients(fitted))
    assert fitted.c0 == 0.0


def test_forgetting_follows_a_node_that_has_become_slower() -> None:
    slower = IterationModel(*(2 * value for value in coefficients(TRUE)))
    fitter = IterationFitter(forgetting=0.98)
    for sample in iterations(TRUE, 500) + iterations(slower, 1000, seed=1):
        fitter.add(sample)
    assert coefficients(fitter.model()) == pytest.approx(coefficients(slower), rel=0.01)
    remembering = IterationModel.fit(iterations(TRUE, 500) + iterations(slower, 500, seed=1))
    assert remembering.c_pf < 1.9 * TRUE.c_pf
    assert not remembering.good  # half of the iterations are off by a third


def test_what_prefill_costs_is_not_forgotten_while_none_comes() -> None:
    fitter = IterationFitter(forgetting=0.98)
    for sample in iterations(TRUE, 200):
        fitter.add(sample)
    for place in range(5000):
        # The tail of a prompt that was transferred is no prefill, and its time says nothing of one.
        n_decode, tail = place % 64, [(1 + place % 32, 500)] if place % 3 == 0 else []
        fitter.add(Iteration(n_decode, 300 * n_decode, tail, TRUE.time(n_decode, 300 * n_decode, tail)))
    assert fitter.model().good
    assert coefficients(fitter.model()) == pytest.approx(coefficients(TRUE), rel=0.01)


@pytest.mark.parametrize(
    ("samples", "good"),
    [
        (iterations(TRUE, 31), False),  # too few
        (iterations(TRUE, 60), True),
        ([Iteration(n, 100 * n, [], TRUE.time(n, 100 * n)) for n in range(1, 60)], False),  # never a prefill
        (iterations(TRUE, 300, noise=0.6), False),  # does not fit
    ],
)
def test_when_a_fit_is_good(samples: list[Iteration], good: bool) -> None:
    assert IterationModel.fit(samples).good is good


def test_given_coefficients_need_no_fit() -> None:
    assert TRUE.good
    assert not IterationModel(
        1, 0, 0, 0, 0, quality=FitQuality(error=0.2, iterations=500.0, prefills=500.0)
    ).good


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 12), empty=st.sampled_from([None, 1, 4]))
def test_the_solution_is_optimal(seed: int, rows: int, empty: int | None) -> None:
    """Karush-Kuhn-Tucker: no gradient along a positive coefficient, none downhill from a zero one."""
    draw = np.random.default_rng(seed)
    matrix = draw.normal(size=(rows, 5)) * 10.0 ** draw.integers(-4, 5, size=5)
    if empty is not None:
        matrix[:, empty] = 0.0
    target = np.ones(rows)
    gram, moment = matrix.T @ matrix, matrix.T @ target
    found, squares = _nonnegative_least_squares(gram, moment, float(rows))
    assert (found >= 0.0).all()
    residual = target - matrix @ found
    assert squares == pytest.approx(residual @ residual, abs=1e-6)
    scale = np.linalg.norm(matrix, axis=0)
    downhill = (matrix.T @ residual)[scale > 0] / scale[scale > 0]
    assert (downhill <= 1e-4).all()
    assert np.abs(downhill[found[scale > 0] > 0]).max(initial=0.0) <= 1e-4


def test_the_solution_is_no_worse_than_any_on_a_grid() -> None:
    draw = np.random.default_rng(3)
    matrix = draw.normal(size=(9, 5))
    target = draw.normal(size=9)
    _, squares = _nonnegative_least_squares(matrix.T @ matrix, matrix.T @ target, float(target @ target))
    for point in itertools.product(np.linspace(0.0, 1.5, 5), repeat=5):
        residual = target - matrix @ np.array(point)
        assert squares <= residual @ residual + 1e-9
    assert squares < target @ target


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: IterationModel(-1.0, 0, 0, 0, 0), "a: -1.0; valid"),
        (lambda: IterationModel(0, 0, 0, float("nan"), 0), "c_pf: nan"),
        (lambda: IterationModel.fit([]), "samples: none"),
        (lambda: IterationModel.fit([], forgetting=0.0), "forgetting: 0.0"),
        (lambda: IterationModel.fit([(1, 1, [], 0.0)]), "sample.seconds: 0.0"),
        (lambda: IterationModel.fit([(1, 1, [], float("inf"))]), "sample.seconds: inf"),
        (lambda: IterationModel.fit([(-1, 1, [], 0.1)]), "sample: "),
        (lambda: IterationModel.fit([(1, 1, [(-5, 3), (9, 0)], 0.1)]), "sample.chunks: "),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
