"""Baselines from the literature, each against a small case that can be tried out or worked by hand."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from placement_problems import ranks_of

from gimbal_kernels.placement import PlacementProblem, evaluate, place
from gimbal_kernels.placement.hierarchy import place_by_node
from gimbal_kernels.topology import Topology


def grouped(seed: int, *, layers: int = 4, experts: int = 32, ranks: int = 8, spare: int = 0):
    rng = np.random.default_rng(seed)
    traffic = rng.integers(1, 10_000, (layers, 2, experts))
    topology = Topology.grid(nodes=2, gpus_per_node=ranks // 2, sources=2)
    return PlacementProblem(traffic, topology, (experts + spare) // ranks)


# ---- EPLB by node


@pytest.mark.parametrize("spare", [0, 8, 16])
def test_groups_stay_whole_and_no_expert_is_twice_on_a_rank(spare):
    for seed in range(20):
        problem = grouped(seed, spare=spare)
        found = place_by_node(problem, nodes=2, groups=8)
        for row in found.slots:
            held = ranks_of(row, problem.slots_per_rank)
            assert all(len(set(experts)) == len(experts) for experts in held)
            on_node = [{e // 4 for experts in held[n * 4 : n * 4 + 4] for e in experts} for n in range(2)]
            assert not on_node[0] & on_node[1]
            assert len(on_node[0]) == len(on_node[1]) == 4


def test_one_node_and_one_group_is_method_eplb():
    for spare in (0, 8):
        problem = grouped(3, spare=spare)
        found = place_by_node(problem, nodes=1, groups=1)
        assert found.slots.tolist() == place(problem, method="eplb").slots.tolist()


def test_without_spare_slots_the_experts_of_each_rank_are_those_of_vllms_policy():
    policy = pytest.importorskip(
        "vllm.distributed.eplb.policy.default", reason="vLLM is not installed"
    ).DefaultEplbPolicy
    for seed in range(10):
        problem = grouped(seed)
        load = problem.traffic.sum(axis=1)
        theirs = policy.rebalance_experts_hierarchical(load, 32, 8, 2, 8)
        ours = place_by_node(problem, nodes=2, groups=8).slots
        for row, other in zip(ours, theirs, strict=True):
            assert [set(x) for x in ranks_of(row, 4)] == [set(x) for x in ranks_of(other, 4)]


def test_with_spare_slots_the_fullest_rank_is_no_fuller_than_in_vllms_policy_on_average():
    policy = pytest.importorskip(
        "vllm.distributed.eplb.policy.default", reason="vLLM is not installed"
    ).DefaultEplbPolicy
    flat = Topology(np.zeros((1, 8)))
    ours, theirs = [], []
    for seed in range(10):
        problem = grouped(seed, spare=16)
        load = problem.traffic.sum(axis=1)
        even = PlacementProblem(load[:, None], flat, problem.slots_per_rank)
        other = policy.rebalance_experts_hierarchical(load, 48, 8, 2, 8)
        ours.append(evaluate(even, place_by_node(problem, nodes=2, groups=8).slots).max_over_mean.mean())
        theirs.append(evaluate(even, other).max_over_mean.mean())
    assert np.mean(ours) <= 1.01 * np.mean(theirs)


def test_a_layer_without_traffic_stays_where_it_is():
    problem = grouped(1)
    traffic = problem.traffic.copy()
    traffic[2] = 0
    current = np.random.default_rng(0).permuted(np.tile(np.arange(32), (4, 1)), axis=1)
    found = place_by_node(PlacementProblem(traffic, problem.topology, 4, current), nodes=2, groups=8)
    assert found.slots[2].tolist() == current[2].tolist()
    assert found.moves[2] == 0


@pytest.mark.parametrize(
    ("nodes", "groups", "message"),
    [
        (3, 8, "nodes: 3 does not divide 8 ranks; nearest valid: 2"),
        (2, 5, "groups: 5 does not divide 32 experts; nearest valid: 4"),
        (8, 4, "nodes: 8 does not divide 4 groups; nearest valid: 4"),
        (0, 4, "nodes: 0; valid: an integer >= 1"),
        (2, 2.0, "groups: 2.0; valid: an integer >= 1"),
    ],
)
def test_numbers_that_do_not_divide_are_named(nodes, groups, message):
    with pytest.raises(ValueError, match=message):
        place_by_node(grouped(0), nodes=nodes, groups=groups)


def test_more_slots_on_a_rank_than_experts_on_a_node():
    problem = PlacementProblem(np.ones((1, 1, 8)), Topology(np.zeros((1, 4))), 6)
    with pytest.raises(ValueError, match=r"nodes: 2 leave 4 experts to a node.*at most 1 nodes"):
        place_by_node(problem, nodes=2, groups=4)


# ---- offline baselines, with HiGHS


@pytest.fixture(scope="module")
def offline():
    pytest.importorskip("highspy", reason="highspy (extra offline) is not installed")
    from gimbal_kernels.placement import offline as module

    return module


def test_profiles_count_what_loops_count(offline):
    from gimbal_kernels.placement.offline.profile import expert_transitions, request_picks

    rng = np.random.default_rng(1)
    ids, owner = rng.integers(0, 5, (40, 3, 2)), rng.integers(0, 4, 40)
    flow, picks = np.zeros((2, 5, 5), int), np.zeros((4, 3, 5), int)
    for token, request in zip(ids, owner, strict=True):
        for layer in range(3):
            for e in token[layer]:
                picks[request, layer, e] += 1
                for f in token[layer + 1] if layer < 2 else ():
                    flow[layer, e, f] += 1
    assert expert_transitions(ids, 5).tolist() == flow.tolist()
    assert request_picks(ids, owner, 5).tolist() == picks.tolist()
    with pytest.raises(ValueError, match="topk_ids: from 0 to 4; valid: 0 to 3"):
        expert_transitions(ids, 4)
    with pytest.raises(ValueError, match=r"request: shape \(39,\)"):
        request_picks(ids, owner[1:], 5)


def test_moetuner_keeps_chains_of_experts_on_a_rank(offline):
    from gimbal_kernels.placement.offline.moetuner import remote_transitions
    from gimbal_kernels.placement.offline.reference import home_of

    rng = np.random.default_rng(2)
    layers, experts = 4, 8
    flow = np.zeros((layers - 1, experts, experts))
    for layer in range(layers - 1):
        flow[layer, np.arange(experts), rng.permutation(experts)] = 100
    problem = PlacementProblem(
        np.full((layers, 2, experts), 50), Topology.grid(gpus_per_node=2, sources=2), 4
    )
    found = offline.moetuner(problem, flow)
    home = np.stack([home_of(row, 4) for row in found.slots.numpy()])
    assert remote_transitions(flow, home).tolist() == [0, 0, 0]
    assert found.max_over_mean.tolist() == [1.0] * layers
    contiguous = np.tile(np.arange(experts) // 4, (layers, 1))
    assert remote_transitions(flow, contiguous).mean() > 0.3


@pytest.mark.parametrize("seed", range(4))
def test_moetuner_ends_where_no_single_layer_can_be_improved(offline, seed):
    from gimbal_kernels.placement.offline.moetuner import remote_transitions
    from gimbal_kernels.placement.offline.reference import home_of

    rng = np.random.default_rng(seed)
    flow = rng.poisson(10 * np.exp(rng.standard_normal((3, 6, 6)))).astype(float)
    traffic = rng.poisson(50 * np.exp(0.3 * rng.standard_normal((4, 1, 6))))
    problem = PlacementProblem(traffic, Topology([[0, 1]]), 3)
    found = offline.moetuner(problem, flow, balance=0.5, sweeps=20, gap=1e-9)
    home = np.stack([home_of(row, 3) for row in found.slots.numpy()])

    def total(home):
        loads = [np.bincount(h, weights=t[0], minlength=2) for h, t in zip(home, traffic, strict=True)]
        return remote_transitions(flow, home).sum() + 0.5 * sum(x.max() / x.mean() for x in loads)

    splits = [np.array(s) for s in product(range(2), repeat=6) if sum(s) == 3]
    for layer in range(4):
        for other in splits:
            changed = home.copy()
            changed[layer] = other
            assert total(home) <= total(changed) + 1e-9


def test_sem_moe_finds_the_clusters_that_were_planted(offline):
    rng = np.random.default_rng(4)
    kind = rng.permutation(np.repeat([0, 1], 12))
    taste = [rng.permuted(np.repeat([0, 1], 4)) for _ in range(3)]  # which kind of request uses an expert
    picks = np.zeros((24, 3, 8))
    for n, mine in enumerate(kind):
        for layer in range(3):
            picks[n, layer, taste[layer] == mine] = rng.integers(5, 15, 4)
    topology = Topology.grid(gpus_per_node=2, sources=2)
    found = offline.sem_moe(picks, topology, 4, slack=0.2)
    assert found.remote[-1] == 0.0
    assert list(found.remote) == sorted(found.remote, reverse=True)
    assert len(set(zip(kind.tolist(), found.engines.tolist(), strict=True))) == 2
    replay = offline.oracle_replay(picks, found.slots, topology, batch=24, slack=0.2)
    assert evaluate(PlacementProblem(replay.traffic, topology, 4), found.slots).comm.tolist() == [0, 0, 0]
    assert replay.traffic.sum() == picks.sum()


def test_the_oracle_chooses_the_best_assignment_that_keeps_engines_level(offline):
    rng = np.random.default_rng(5)
    topology = Topology.grid(gpus_per_node=2, sources=2)
    slots = np.tile(np.arange(8), (2, 1))
    for _ in range(10):
        picks = rng.poisson(4 * np.exp(rng.standard_normal((8, 2, 8))))
        work = picks.sum(axis=(1, 2))
        found = offline.oracle_replay(picks, slots, topology, batch=8, slack=0.1, gap=1e-9)
        # Experts 0 to 3 are with source 0: a request there pays for the others, and the other way round.
        cost = np.stack([picks[:, :, 4:].sum(axis=(1, 2)), picks[:, :, :4].sum(axis=(1, 2))], axis=1)
        best = min(
            cost[np.arange(8), list(chosen)].sum()
            for chosen in product(range(2), repeat=8)
            if np.bincount(chosen, weights=work, minlength=2).max() <= 1.1 * work.sum() / 2
        )
        assert cost[np.arange(8), found.engines].sum() == best


def test_the_oracle_is_served_by_the_nearest_copy(offline):
    topology = Topology([[0, 1], [1, 0]])
    picks = np.array([[[5, 0, 0]], [[5, 0, 0]], [[0, 5, 0]], [[0, 0, 5]]])
    found = offline.oracle_replay(picks, [[0, 1, 0, 2]], topology, slack=0.0)
    assert found.engines[2:].tolist() == [0, 1]
    assert sorted(found.engines[:2].tolist()) == [0, 1]
    assert evaluate(PlacementProblem(found.traffic, topology, 2), [[0, 1, 0, 2]]).comm.tolist() == [0.0]
    # Expert 0 is near both sources, so expert 1 alone decides.
    alone = offline.oracle_replay([[[10, 1, 0]]], [[0, 1, 0, 2]], topology, slack=1.0)
    assert alone.engines.tolist() == [0]


def test_the_oracle_remembers_what_engines_got_in_earlier_batches(offline):
    topology = Topology([[0, 1], [1, 0]])
    alike = np.tile([[[5, 0]]], (8, 1, 1))  # all would be served nearer at source 0
    found = offline.oracle_replay(alike, [[0, 1]], topology, batch=2, slack=0.1)
    assert np.bincount(found.engines).tolist() == [4, 4]
    single = offline.oracle_replay(alike, [[0, 1]], topology, batch=1, slack=0.1)
    assert np.bincount(single.engines).tolist() == [4, 4]


def test_bad_input_to_the_offline_baselines_is_named(offline):
    topology = Topology.grid(gpus_per_node=2, sources=2)
    problem = PlacementProblem(np.ones((2, 2, 4)), topology, 2)
    with pytest.raises(ValueError, match=r"transitions: shape \(2, 4, 4\); valid: \[1, 4, 4\]"):
        offline.moetuner(problem, np.ones((2, 4, 4)))
    with pytest.raises(ValueError, match="transitions: has negative"):
        offline.moetuner(problem, -np.ones((1, 4, 4)))
    with pytest.raises(ValueError, match="sweeps: 0"):
        offline.moetuner(problem, np.ones((1, 4, 4)), sweeps=0)
    with pytest.raises(ValueError, match="one slot per expert"):
        offline.moetuner(PlacementProblem(np.ones((2, 2, 4)), topology, 3), np.ones((1, 4, 4)))
    with pytest.raises(ValueError, match="slots_per_rank: 3 on 2 ranks for 4 experts"):
        offline.sem_moe(np.ones((3, 2, 4)), topology, 3)
    with pytest.raises(ValueError, match=r"picks: shape \(2, 4\)"):
        offline.sem_moe(np.ones((2, 4)), topology, 2)
    with pytest.raises(ValueError, match=r"slots: shape \(1, 5\)"):
        offline.oracle_replay(np.ones((3, 1, 4)), np.zeros((1, 5), int), topology)
    with pytest.raises(ValueError, match="batch: 0"):
        offline.oracle_replay(np.ones((3, 1, 4)), [[0, 1, 2, 3]], topology, batch=0)


def test_moetuner_with_one_pair_of_layers_is_close_to_the_best_of_all(offline):
    from gimbal_kernels.placement.offline.moetuner import remote_transitions
    from gimbal_kernels.placement.offline.reference import home_of

    rng = np.random.default_rng(6)
    flow = rng.poisson(20 * np.exp(rng.standard_normal((1, 6, 6)))).astype(float)
    problem = PlacementProblem(np.ones((2, 1, 6)), Topology([[0, 1, 1]]), 2)
    found = offline.moetuner(problem, flow, sweeps=10)
    home = np.stack([home_of(row, 2) for row in found.slots.numpy()])
    splits = [np.array(s) for s in set(permutations([0, 0, 1, 1, 2, 2]))]
    every = [remote_transitions(flow, np.stack(pair))[0] for pair in product(splits, splits)]
    assert remote_transitions(flow, home)[0] <= np.quantile(every, 0.02)
