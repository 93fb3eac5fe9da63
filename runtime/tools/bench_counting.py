"""The counting benchmark: ours against a plain-torch version and the copying alone, in one run.

Variants of one step (map [T, K] ids to slots, count picks per source and expert, count load per slot):

- the backends of `map_and_count` that work here;
- bincount: a gather with a replica choice (row mod copies) and `torch.bincount`, as one would write it in torch; on
  a GPU index_add, which needs no value on the host;
- gather only: that gather without replica choice and without counting;
- on a GPU, per pick: Triton with one global atomic per pick and counter, and the same kernel mapping only;
- copy only: reads the ids and writes as many bytes, the floor.

Times compare only within one run. On a CPU the variants of a row take turns and the first quartile is given; on
a GPU they run in a captured graph, the L2 cache flushed before each, the flush's own time subtracted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gimbal_kernels.counting import ReplicaMap, available_backends, map_and_count
from gimbal_kernels.topology import Topology

Step = Callable[[], object]
RANKS, SPARE = 4, 16
FLUSH_BYTES = 128 << 20  # more than any current GPU's L2 cache


@dataclass(frozen=True)
class Shape:
    """T rows of K picks among E experts; S > 1: every row has a source, in blocks as after an all-gather."""

    tokens: int
    experts: int = 128
    top_k: int = 8
    sources: int = 1


def sweep() -> list[Shape]:
    """Each size alone varied about T = 4,096, E = 128, K = 8, S = 1."""
    shapes = [Shape(4**i) for i in range(8)]
    shapes += [Shape(4096, experts=e) for e in (64, 256, 512)]
    shapes += [Shape(4096, top_k=k) for k in (1, 4, 10)]
    return shapes + [Shape(t, sources=s) for s in (8, 64) for t in (64, 4096)]


@dataclass(frozen=True)
class Inputs:
    """The tensors of a shape on one device."""

    shape: Shape
    replica_map: ReplicaMap
    ids: Any
    source: Any
    counts: Any
    load: Any
    out: Any


def make_inputs(shape: Shape, device: str, *, spare: bool = True) -> Inputs:
    """Random distinct experts per row; with `spare`, SPARE experts have a second copy."""
    generator = torch.Generator().manual_seed(shape.tokens + shape.experts)
    slots = torch.arange(shape.experts + SPARE * spare) % shape.experts
    topology = Topology([[1.0] * RANKS] * shape.sources)
    weights = torch.rand(shape.tokens, shape.experts, generator=generator)
    ids = weights.topk(shape.top_k).indices.int().to(device)
    rows = torch.arange(shape.tokens) * shape.sources // shape.tokens
    return Inputs(
        shape=shape,
        replica_map=ReplicaMap.from_slots(
            slots[None], topology, num_experts=shape.experts, device=device, max_replicas=1 + spare
        ),
        ids=ids,
        source=0 if shape.sources == 1 else rows.to(device),
        counts=torch.zeros(1, shape.sources, shape.experts, dtype=torch.int64, device=device),
        load=torch.zeros(1, len(slots), dtype=torch.int32, device=device),
        out=torch.empty_like(ids),
    )


def steps(inputs: Inputs) -> dict[str, Step]:
    """Every variant that works on the inputs' device, by name."""
    named: dict[str, Step] = {}
    on_gpu = inputs.ids.is_cuda
    for name, state in available_backends().items():
        serves = name != "host" if on_gpu else name in ("torch", "host")
        if state == "ready" and serves:
            named[name] = lambda name=name: map_and_count(  # type: ignore[misc]
                inputs.ids,
                inputs.replica_map,
                inputs.counts,
                layer=0,
                source=inputs.source,
                physical_load=inputs.load,
                out=inputs.out,
                backend=name,
            )
    named["bincount"] = _bincount(inputs)
    first = inputs.replica_map.replicas[0, 0, :, 0].contiguous()
    named["gather only"] = lambda: torch.take(first, inputs.ids.long(), out=inputs.out)
    if on_gpu:
        from . import bench_triton

        named["per pick"] = lambda: bench_triton.map_per_pick(inputs, count=True)
        named["map only"] = lambda: bench_triton.map_per_pick(inputs, count=False)
    named["copy only"] = lambda: inputs.out.copy_(inputs.ids)
    return named


def _bincount(inputs: Inputs) -> Step:
    """A vectorised gather and bincounts; on a GPU index_add, which needs no value on the host."""
    shape, table = inputs.shape, inputs.replica_map.replicas[0]
    copies = inputs.replica_map.nearest[0]
    row = torch.arange(shape.tokens, device=inputs.ids.device)[:, None]
    on_gpu = inputs.ids.is_cuda

    def add(counters: Any, cells: Any) -> None:
        if on_gpu:
            counters.index_add_(0, cells, torch.ones_like(cells, dtype=counters.dtype))
        else:
            counters += torch.bincount(cells, minlength=counters.numel())

    def step() -> None:
        ids = inputs.ids.long()
        source = inputs.source if shape.sources == 1 else inputs.source[:, None]
        slots = table[source, ids, row % copies[source, ids]]
        inputs.out.copy_(slots)
        add(inputs.counts.view(-1), (source * shape.experts + ids).view(-1))
        add(inputs.load.view(-1), slots.view(-1))

    return step


def time_on_cpu(named: dict[str, Step], seconds: float) -> dict[str, float]:
    """Microseconds of each step: the first quartile of samples that are taken in turns."""
    calls = {}
    for name, step in named.items():
        step()
        start = time.perf_counter()
        step()
        calls[name] = max(1, int(200e-6 / max(1e-7, time.perf_counter() - start)))
    samples: dict[str, list[float]] = {name: [] for name in named}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples["copy only"]) < 5:
        for name, step in named.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                step()
            samples[name].append((time.perf_counter() - start) / calls[name] * 1e6)
    return {name: statistics.quantiles(values, n=4)[0] for name, values in samples.items()}


def time_on_gpu(named: dict[str, Step], rounds: int = 20) -> dict[str, float]:
    """Microseconds of each step in a graph replay with a cold L2 cache, the flush subtracted."""
    cache = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    flush = _replay_seconds(cache.zero_, rounds)
    return {
        name: (_replay_seconds(lambda step=step: (cache.zero_(), step()), rounds) - flush) * 1e6  # type: ignore[misc]
        for name, step in named.items()
    }


def _replay_seconds(step: Step, rounds: int) -> float:
    """Seconds of one step: the median over replays of a graph that holds `rounds` of it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            step()
    spent: list[float] = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(float(begin.elapsed_time(end)) / 1e3 / rounds)
    return float(statistics.median(spent))


def measure(device: str, shapes: list[Shape], seconds: float) -> Iterator[dict[str, Any]]:
    """One row per shape: its sizes and microseconds by variant."""
    for shape in shapes:
        named = steps(make_inputs(shape, device))
        spent = time_on_gpu(named) if device == "cuda" else time_on_cpu(named, seconds)
        yield asdict(shape) | {"microseconds": {name: round(value, 2) for name, value in spent.items()}}
