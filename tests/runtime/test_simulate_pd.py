"""The simulator of disaggregated serving: single requests by hand, and what deflection changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gimbal_runtime.iteration_model import IterationModel
from gimbal_runtime.tools.sim_pd import Deployment, PdSettings, prefill_rate, simulate_pd
from gimbal_runtime.tools.sim_traffic import Arrival, at_rate, generate_disaggregated

MODEL = IterationModel(0.009, 6e-5, 2.5e-8, 8e-5, 4e-10)


def test_a_lone_request_by_hand() -> None:
    settings = PdSettings(model=MODEL, noise=0.0, token_budget=1_000)
    measured = simulate_pd(settings, [Arrival(0.0, 2_500, 10)], deflect=False)
    prefill = MODEL.time(0, 0, [(2_500, 0)]) + 2 * MODEL.a  # three iterations
    assert measured.prefill == pytest.approx(prefill)
    assert measured.transfer == pytest.approx(2_500 * 31e3 / 4e9)
    assert (measured.queueing, measured.deflected) == (0.0, 0.0)
    assert measured.ttft_mean == pytest.approx(prefill + measured.transfer)


def test_a_lone_request_is_deflected_to_an_idle_node_when_the_transfer_is_slow() -> None:
    settings = PdSettings(model=MODEL, noise=0.0, bandwidth=1e8)
    measured = simulate_pd(settings, [Arrival(0.0, 2_500, 10)], deflect=True)
    assert measured.deflected == 1.0
    assert measured.transfer == 0.0
    assert measured.ttft_mean == pytest.approx(MODEL.time(0, 0, [(2_500, 0)]) + MODEL.a)


def test_the_parts_add_up_to_the_time_to_first_token() -> None:
    settings = PdSettings()
    arrivals = generate_disaggregated(300, 1)
    arrivals = at_rate(arrivals, 0.8 * prefill_rate(arrivals, settings))
    for deflect in (False, True):
        measured = simulate_pd(settings, arrivals, deflect=deflect)
        parts = measured.queueing + measured.prefill + measured.transfer
        assert parts == pytest.approx(measured.ttft_mean)
        assert min(measured.queueing, measured.prefill, measured.transfer) >= 0.0


@pytest.mark.parametrize(("prefills", "decodes"), [(2, 2), (3, 1), (1, 3)])
def test_deflection_shortens_the_tail_and_keeps_tokens_on_time(prefills: int, decodes: int) -> None:
    settings = PdSettings(prefill_nodes=prefills, decode_nodes=decodes)
    arrivals = generate_disaggregated(300, 2)
    arrivals = at_rate(arrivals, 0.95 * prefill_rate(arrivals, settings))
    without = simulate_pd(settings, arrivals, deflect=False)
    deflected = simulate_pd(settings, arrivals, deflect=True)
    assert deflected.ttft_p95 < without.ttft_p95
    assert deflected.attainment > without.attainment
    assert deflected.late_tokens <= without.late_tokens + 1e-9
    assert 0.0 < deflected.deflected < 1.0
    assert without.deflected == 0.0


def test_waiting_requests_are_worth_a_second_look() -> None:
    once = PdSettings(reconsider=False)
    arrivals = generate_disaggregated(500, 0)
    arrivals = at_rate(arrivals, 0.95 * prefill_rate(arrivals, once))
    on_arrival = simulate_pd(once, arrivals, deflect=True)
    again = simulate_pd(PdSettings(), arrivals, deflect=True)
    assert again.ttft_p95 < 0.8 * on_arrival.ttft_p95


def test_prefill_nodes_serve_in_the_order_of_their_queue() -> None:
    """A long prompt in service, then a long and a short one: which of these two comes first is the queue's."""
    arrivals = [Arrival(0.0, 8_000, 2), Arrival(0.001, 8_000, 2), Arrival(0.002, 100, 2)]
    base = {"model": MODEL, "noise": 0.0, "prefill_nodes": 1, "decode_nodes": 1}
    step = MODEL.time(0, 0, [(8_000, 0)])
    short = MODEL.time(0, 0, [(100, 0)])
    fcfs = simulate_pd(PdSettings(**base, token_budget=8_000), arrivals, deflect=False)
    # Arrival order computes the short one last; a third of the wait that this costs it is in the mean.
    assert fcfs.queueing == pytest.approx((0.0 + (step - 0.001) + (2 * step - 0.002)) / 3)
    first = simulate_pd(PdSettings(**base, token_budget=8_000, age_limit=5.0), arrivals, deflect=False)
    # The rest of that iteration's budget is for the long one's first 7,900 tokens.
    assert first.queueing == pytest.approx((0.0 + (step - 0.001) + (step - 0.002)) / 3)
    assert first.ttft_mean < fcfs.ttft_mean
    assert short < step


@pytest.mark.parametrize(("age_limit", "in_order"), [(0.0, True), (5.0, False)])
def test_an_age_limit_of_0_is_arrival_order(age_limit: float, in_order: bool) -> None:
    arrivals = at_rate(generate_disaggregated(200, 5), 12.0)
    settings = PdSettings(prefill_nodes=1, age_limit=age_limit)
    deployment = Deployment(settings, arrivals, deflect=False, seed=0)
    deployment.run()
    begun = [job.begun for job in deployment.jobs]
    assert (begun == sorted(begun)) is in_order


def test_shortest_first_shortens_the_tail_of_crowded_prefill_nodes() -> None:
    settings = PdSettings(prefill_nodes=3, decode_nodes=1)
    arrivals = generate_disaggregated(600, 1)
    arrivals = at_rate(arrivals, 0.8 * prefill_rate(arrivals, settings))
    by_arrival = simulate_pd(settings, arrivals, deflect=True)
    by_size = simulate_pd(replace(settings, age_limit=5.0), arrivals, deflect=True)
    assert by_size.ttft_p95 < 0.9 * by_arrival.ttft_p95
    assert by_size.ttft_mean < by_arrival.ttft_mean


def test_tokens_are_late_when_the_limit_is_below_the_batch_itself() -> None:
    """The count of late tokens can be other than 0."""
    settings = PdSettings(tbt_slo=0.0095)
    arrivals = at_rate(generate_disaggregated(200, 3), 5.0)
    assert simulate_pd(settings, arrivals, deflect=False).late_tokens > 0.1


def test_runs_are_repeatable() -> None:
    arrivals = at_rate(generate_disaggregated(200, 3), 8.0)
    runs = [simulate_pd(PdSettings(), arrivals, deflect=True, seed=4) for _ in range(2)]
    assert runs[0] == runs[1]
