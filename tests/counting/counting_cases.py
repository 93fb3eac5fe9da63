"""Inputs on which every counting backend must agree, a naive count to agree with, and guarded buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gimbal_kernels.counting import ReplicaMap, map_and_count
from gimbal_kernels.topology import Topology

GUARD = 64
GUARD_VALUE = 0x5A5A5A5A


@dataclass(frozen=True)
class Case:
    """One call of map_and_count; shapes as in SPEC section 1, the layer is the last one."""

    name: str
    tokens: int = 37
    top_k: int = 8
    experts: int = 128
    ranks: int = 4
    slots: int = 144
    sources: int = 2
    layers: int = 3
    layer: int = 1
    source: Any = 1  # an int, "blocks" (as after an all-gather), "mixed" or "stray" (some outside [0, S))
    id_dtype: Any = torch.int32
    count_dtype: Any = torch.int64
    load_dtype: Any = torch.int32
    num_tokens: Any = None  # None, an int, or ("device", n)
    enabled: Any = None  # None, a bool, or ("device", value, dtype)
    with_load: bool = True
    layout: str = "plain"  # or "transposed", "in place"
    shares: Any = None  # or "random" (some of them 0), "even" (over the nearest copies)
    ids: Any = field(default=None)  # default: random, with padding ids on both sides of [0, E)


CASES = [
    Case("plain"),
    Case("one block and a bit", tokens=129),
    Case("many blocks", tokens=421, top_k=6),
    Case("int64 ids", id_dtype=torch.int64),
    Case("int32 counts, int64 load", count_dtype=torch.int32, load_dtype=torch.int64),
    Case("no load", with_load=False),
    Case("padding ids", tokens=2, top_k=2, experts=8, slots=8, source=0, ids=[[-1, 3], [8, -1]]),
    Case("no rows", tokens=0),
    Case("no columns", top_k=0),
    Case("one expert", tokens=9, top_k=1, experts=1, slots=4),
    Case("one rank, one source", ranks=1, slots=130, sources=1, source=0),
    Case("1025 experts", tokens=40, experts=1025, slots=1028),
    Case("1500 slots", tokens=40, experts=1000, slots=1500, sources=3),
    Case("num_tokens on the device", tokens=8, num_tokens=("device", 5)),
    Case("num_tokens 0", num_tokens=("device", 0)),
    Case("num_tokens past the end", num_tokens=("device", 1000)),
    Case("num_tokens int", num_tokens=11),
    Case("num_tokens int past 64 bits", num_tokens=2**64),
    Case("disabled on the device", enabled=("device", 0, torch.int32)),
    Case("enabled on the device", enabled=("device", 1, torch.bool)),
    Case("disabled int", enabled=False),
    Case("source blocks", tokens=200, sources=8, source="blocks", slots=160),
    Case("source mixed", tokens=150, sources=8, source="mixed", slots=160),
    Case("source stray", tokens=60, sources=3, source="stray"),
    Case("blocks and scalars", source="blocks", num_tokens=("device", 20), enabled=("device", 1, torch.int64)),
    Case("transposed", layout="transposed"),
    Case("in place", layout="in place"),
    Case("random shares", shares="random", source="mixed"),
    Case("random shares, several blocks", tokens=300, shares="random", experts=20, slots=32),
    Case("even shares", shares="even", experts=8, slots=40),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def random_slots(rng: np.random.Generator, layers: int, experts: int, total: int) -> np.ndarray:
    """[L, P], every expert somewhere; spare copies go to few experts, so that some have many."""
    spare = rng.integers(0, max(1, experts // 8), (layers, total - experts))
    base = np.tile(np.arange(experts), (layers, 1))
    return rng.permuted(np.concatenate([base, spare], axis=1), axis=1)


def guarded(shape: tuple[int, ...], dtype: Any, device: Any, fill: Any) -> tuple[Any, Any]:
    """A tensor inside a larger buffer whose other words hold GUARD_VALUE; and that buffer."""
    size = int(np.prod(shape))
    buffer = torch.full((GUARD + size + GUARD,), GUARD_VALUE, dtype=dtype, device=device)
    inner = buffer[GUARD : GUARD + size].view(shape)
    inner.copy_(torch.as_tensor(fill).to(dtype))
    return inner, buffer


@dataclass(frozen=True)
class Prepared:
    """The tensors of a case on a device."""

    case: Case
    replica_map: ReplicaMap
    slots: np.ndarray
    distance: np.ndarray
    shares: np.ndarray | None
    ids: Any
    source: Any
    num_tokens: Any
    enabled: Any


def prepare(case: Case, *, seed: int = 0, device: Any = "cpu") -> Prepared:
    rng = np.random.default_rng([seed, len(case.name), case.tokens])
    slots = random_slots(rng, case.layers, case.experts, case.slots)
    distance = rng.integers(0, 3, (case.sources, case.ranks)).astype(float)
    shares = make_shares(rng, case, slots, distance)
    replica_map = ReplicaMap.from_slots(
        slots, Topology(distance), num_experts=case.experts, device=device, shares=shares
    )
    ids = case.ids
    if ids is None:
        low = min(case.experts, 4)
        ids = rng.integers(-2, case.experts + 2, (case.tokens, case.top_k))
        ids = np.where(rng.random(ids.shape) < 0.4, rng.integers(0, low, ids.shape), ids)
    ids = torch.tensor(np.array(ids), dtype=case.id_dtype, device=device)
    return Prepared(
        case=case,
        replica_map=replica_map,
        slots=slots,
        distance=distance,
        shares=shares,
        ids=ids,
        source=_source(case, rng, device),
        num_tokens=_scalar(case.num_tokens, torch.int32, device),
        enabled=_scalar(case.enabled, None, device),
    )


def make_shares(rng: np.random.Generator, case: Case, slots: np.ndarray, distance: np.ndarray) -> Any:
    """float64 [L, S, P], each expert's copies sum to 1 for every source; or None."""
    if case.shares is None:
        return None
    shares = np.zeros((case.layers, case.sources, case.slots))
    for layer, source, expert in np.ndindex(case.layers, case.sources, case.experts):
        copies = np.flatnonzero(slots[layer] == expert)
        near = distance[source, copies // (case.slots // case.ranks)]
        part = (near == near.min()).astype(float)
        if case.shares == "random":
            part = rng.random(len(copies)) * (rng.random(len(copies)) < 0.7)
            part[rng.integers(len(copies))] += 0.1
        shares[layer, source, copies] = part / part.sum()
    return shares


def _source(case: Case, rng: np.random.Generator, device: Any) -> Any:
    if isinstance(case.source, int):
        return case.source
    if case.source == "blocks":
        rows = np.arange(case.tokens) * case.sources // max(1, case.tokens)
    else:
        stray = int(case.source == "stray")
        rows = rng.integers(-stray, case.sources + stray, case.tokens)
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _scalar(value: Any, dtype: Any, device: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return torch.tensor([value[1]], dtype=dtype if len(value) == 2 else value[2], device=device)


def run(prepared: Prepared, backend: str) -> dict[str, Any]:
    """Calls map_and_count; returns the result and every buffer, guard words included, on the host."""
    case, device = prepared.case, prepared.ids.device
    shape = (case.layers, case.sources, case.experts)
    fill = torch.arange(case.layers * case.sources * case.experts).view(shape) % 7
    counts, counts_buffer = guarded(shape, case.count_dtype, device, fill)
    load_shape = (case.layers, case.slots)
    load, load_buffer = guarded(load_shape, case.load_dtype, device, torch.ones(load_shape))
    ids, out_buffer = prepared.ids, None
    if case.layout == "transposed":
        ids = ids.t().contiguous().t()
        out, out_buffer = guarded((case.top_k, case.tokens), ids.dtype, device, 0)
        out = out.t()
    elif case.layout == "in place":
        ids, out_buffer = guarded(tuple(ids.shape), ids.dtype, device, ids)
        out = ids
    else:
        out, out_buffer = guarded(tuple(ids.shape), ids.dtype, device, 0)
    result = map_and_count(
        ids,
        prepared.replica_map,
        counts,
        layer=case.layer,
        source=prepared.source,
        physical_load=load if case.with_load else None,
        num_tokens=prepared.num_tokens,
        enabled=prepared.enabled,
        out=out,
        backend=backend,
    )
    assert result is out
    return {
        "slots": result.cpu().clone(),
        "counts": counts_buffer.cpu(),
        "load": load_buffer.cpu(),
        "out": out_buffer.cpu(),
    }


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    return [name for name in left if not torch.equal(left[name], right[name])]


def naive(prepared: Prepared) -> tuple[list[list[int]], dict[tuple[int, int], int], dict[int, int]]:
    """SPEC section 2 in plain loops: slots [T][K], picks by (source, expert), picks by slot, of the layer."""
    case = prepared.case
    row_slots = prepared.slots[case.layer].tolist()
    slots_per_rank = case.slots // case.ranks
    limit = case.tokens if prepared.num_tokens is None else int(prepared.num_tokens)
    counting = True if prepared.enabled is None else bool(prepared.enabled)
    mapped, picks, load = [], {}, {}
    for t, ids in enumerate(prepared.ids.tolist()):
        source = prepared.source if isinstance(prepared.source, int) else int(prepared.source[t])
        line = []
        for expert in ids:
            if not 0 <= expert < case.experts or not 0 <= source < case.sources:
                line.append(-1)
                continue
            copies = [p for p, e in enumerate(row_slots) if e == expert]
            distances = [float(prepared.distance[source][p // slots_per_rank]) for p in copies]
            if prepared.shares is None:
                near = [p for p, d in zip(copies, distances, strict=True) if d == min(distances)]
                slot = near[naive_choice(t, source, expert, len(near))]
            else:
                part = {p: float(prepared.shares[case.layer, source, p]) for p in copies}
                used = sorted((d, p) for p, d in zip(copies, distances, strict=True) if part[p] > 0)
                slot = naive_weighted_choice(t, source, expert, [(p, part[p]) for _, p in used])
            line.append(slot)
            if counting and t < limit:
                picks[source, expert] = picks.get((source, expert), 0) + 1
                load[slot] = load.get(slot, 0) + 1
        mapped.append(line)
    return mapped, picks, load


def naive_turn(row: int) -> int:
    return (row * 2654435769 + (row // 8) * 2542331567 + (row // 32) * 3337167497) % 2**32


def naive_choice(row: int, source: int, expert: int, copies: int) -> int:
    return (naive_turn(row) * copies // 2**32 + source + expert) % copies


def naive_weighted_choice(row: int, source: int, expert: int, shares: list[tuple[int, float]]) -> int:
    copies = len(shares)
    place = (naive_turn(row) * copies // 2**16 + (source + expert) % copies * 2**16) % (copies * 2**16)
    end = 0.0
    for slot, share in shares[:-1]:
        end += share
        if place < round(end * copies * 2**16):
            return slot
    return shares[-1][0]
